import importlib.metadata
import importlib.util
import logging

import pytest
import torch

from xrpo_fast.rollouts import choose_engine, make_engine
from xrpo_fast.types import Sampling


@pytest.fixture
def no_vllm(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "vllm" else find_spec(name)
    )


def test_auto_says_why_it_falls_to_transformers(no_vllm, build_model, caplog):
    caplog.set_level(logging.INFO, logger="xrpo_fast")
    engine = make_engine(
        "auto",
        model=build_model("Llama"),
        model_path="nowhere",
        sampling=Sampling(temperature=1.0, eos_token_ids=frozenset({5})),
        max_slots=8,
        max_model_len=64,
        pad_token_id=0,
        dtype=torch.float32,
    )
    assert type(engine).__name__ == "TransformersEngine"
    assert engine.num_slots == 8
    assert "rollout.engine = auto: transformers, as vllm is not installed" in caplog.text


def test_auto_takes_vllm_where_it_is_installed(require):
    require("vllm")
    assert choose_engine("auto") == "vllm"


def test_auto_leaves_a_gpu_build_alone_without_a_gpu(monkeypatch, caplog):
    caplog.set_level(logging.INFO, logger="xrpo_fast")

    def distribution(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib.metadata, "distribution", distribution)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.19.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_engine("auto") == "transformers"
    assert "the installed vllm needs a GPU and there is none" in caplog.text
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_engine("auto") == "vllm"


def test_vllm_asked_for_and_missing_is_an_error(no_vllm):
    with pytest.raises(ValueError, match=r'rollout.engine: expected vLLM for engine = "vllm", but'):
        choose_engine("vllm")


def test_an_unknown_engine_is_an_error():
    with pytest.raises(ValueError, match=r"rollout.engine: expected .* got 'sglang'"):
        choose_engine("sglang")
