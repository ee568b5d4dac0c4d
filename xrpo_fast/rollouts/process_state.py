"""What belongs to the whole process and an engine must give back as it found it."""

import contextlib
import os
import random
from collections.abc import Iterator

import numpy as np
import torch


@contextlib.contextmanager
def kept_process_state() -> Iterator[None]:
    """Restore random states, threads, CPU affinity, float32 precision and environment on exit.

    vLLM seeds all global generators, replaces `torch.set_num_threads` by a function that does
    nothing, binds threads to cores, and sets LD_PRELOAD, which every later child process would
    inherit.
    """
    environment = dict(os.environ)
    python_state, numpy_state = random.getstate(), np.random.get_state()
    torch_state = torch.get_rng_state()
    cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    precision = torch.get_float32_matmul_precision()
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = os.sched_getaffinity(0) if has_affinity else set()
    try:
        yield
    finally:
        if os.environ != environment:
            os.environ.clear()
            os.environ.update(environment)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
        if cuda_states:
            torch.cuda.set_rng_state_all(cuda_states)
        torch.set_num_threads = set_num_threads
        if torch.get_num_threads() != num_threads:
            torch.set_num_threads(num_threads)
        torch.set_float32_matmul_precision(precision)
        if has_affinity and os.sched_getaffinity(0) != cores:
            os.sched_setaffinity(0, cores)


@contextlib.contextmanager
def kept_step_state(num_threads: int) -> Iterator[None]:
    """The part of it that one engine step touches: torch's generator, and its threads, of which
    the engine wants another number. Keeping all of it takes a millisecond."""
    before = torch.get_num_threads()
    state = torch.get_rng_state()
    if before != num_threads:
        torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_rng_state(state)
        if before != num_threads:
            torch.set_num_threads(before)
