"""Start, failure and end of a VllmEngine: each test starts its own."""

import os
import random

import numpy as np
import pytest
import torch

from xrpo_fast.rollouts import EngineError
from xrpo_fast.types import Sampling


@pytest.fixture
def start_engine(require, build_model, tmp_path):
    require("vllm")
    from xrpo_fast.rollouts.vllm import VllmEngine

    engines = []
    model = build_model("Llama", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)

    def start():
        sampling = Sampling(temperature=1.0, eos_token_ids=frozenset({5}))
        engines.append(
            VllmEngine(str(tmp_path), sampling, max_slots=4, max_model_len=64, dtype=torch.float32)
        )
        return engines[-1], model

    yield start
    for engine in engines:
        engine.close()


def process_state():
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state()[1].tobytes(),
        "torch": torch.get_rng_state().numpy().tobytes(),
        "threads": torch.get_num_threads(),
        "set_num_threads": torch.set_num_threads,
        "precision": torch.get_float32_matmul_precision(),
        "affinity": os.sched_getaffinity(0),
        "environment": {
            name: value
            for name, value in os.environ.items()
            # Set by torch.compile, which vLLM uses in its first step.
            if "TORCHINDUCTOR_" not in name
        },
        "grad": torch.is_grad_enabled(),
        "dtype": torch.get_default_dtype(),
        "group": torch.distributed.is_initialized(),
    }


def test_the_process_is_left_as_it_was(start_engine, make_requests, run_engine):
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    before = process_state()
    engine, model = start_engine()
    running = process_state()
    assert running.pop("group")
    assert running == {name: value for name, value in before.items() if name != "group"}
    for action in (
        lambda: run_engine(engine, make_requests((4, 9), rollouts=4)),
        lambda: engine.load_weights(model.state_dict().items()),
        engine.sleep,
        engine.wake,
    ):
        action()
        after = process_state()
        assert after.pop("group")
        assert after == running
    engine.close()
    assert process_state() == before
    engine.close()


def test_a_missing_tied_head_ends_the_engine(start_engine, make_requests):
    engine, model = start_engine()
    weights = dict(model.state_dict())
    del weights["lm_head.weight"]
    with pytest.raises(EngineError, match=r"engine: .*expected all weights .*'lm_head.weight'"):
        engine.load_weights(weights.items())
    with pytest.raises(EngineError, match="engine: expected a live vLLM to add a request, but it"):
        engine.submit(make_requests((4,)))


def test_an_unknown_weight_ends_the_engine(start_engine):
    engine, model = start_engine()
    weights = {f"module.{name}": tensor for name, tensor in model.state_dict().items()}
    with pytest.raises(EngineError, match=r"engine: .*expected weights of the model, got 'module"):
        engine.load_weights(weights.items())


def test_a_failing_step_ends_the_engine_at_once(start_engine, make_requests, monkeypatch):
    engine, _ = start_engine()
    engine.submit(make_requests((4,)))

    def die():
        raise RuntimeError("out of memory")

    monkeypatch.setattr(engine._llm.llm_engine, "step", die)
    with pytest.raises(EngineError, match="engine: vLLM failed to run a step: out of memory"):
        engine.step()
    monkeypatch.undo()
    with pytest.raises(EngineError, match="engine: expected a live vLLM to run a step, but it"):
        engine.step()


def test_a_folder_without_a_model_is_an_error(require, tmp_path):
    require("vllm")
    from xrpo_fast.rollouts.vllm import VllmEngine

    sampling = Sampling(temperature=1.0, eos_token_ids=frozenset({5}))
    with pytest.raises(EngineError, match=r"engine: vLLM did not start on .*transformers"):
        VllmEngine(str(tmp_path), sampling, max_slots=4, max_model_len=64, dtype=torch.float32)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 1}, "max_model_len: expected at least 2, got 1"),
        ({"gpu_memory_fraction": 0.0}, r"gpu_memory_fraction: expected .* \(0, 1\], got 0.0"),
        ({"max_slots": 0}, "max_slots: expected at least 1, got 0"),
    ],
    ids=["length", "memory", "slots"],
)
def test_settings_out_of_range_are_refused(settings, message):
    from xrpo_fast.rollouts.vllm import VllmEngine

    sampling = Sampling(temperature=1.0, eos_token_ids=frozenset({5}))
    defaults = {"max_slots": 4, "max_model_len": 64, "dtype": torch.float32}
    with pytest.raises(ValueError, match=message):
        VllmEngine("nowhere", sampling, **{**defaults, **settings})
