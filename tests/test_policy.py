"""The policy's log-probs are those of the model's own logits, whatever its head does to them."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.small_run import make_tiny_model
from xrpo_fast.batching import collate
from xrpo_fast.config import ModelConfig
from xrpo_fast.policy import ModelError, load_policy
from xrpo_fast.types import TrainingRow

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": 2,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny Llama with its tokenizer; tests put other models into it."""
    return make_tiny_model(tmp_path / "model", "llama")


def put_model(folder: Path, architecture: str, **bends: float) -> None:
    config = AutoConfig.for_model(architecture, **SIZES, **bends)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


@pytest.mark.parametrize(
    ("architecture", "bends"),
    [
        ("llama", {}),
        ("cohere", {"logit_scale": 0.0625}),
        ("granite", {"logits_scaling": 8.0}),
        ("gemma2", {"final_logit_softcapping": 0.5}),
    ],
)
def test_logprobs_are_those_of_the_models_logits(folder, architecture, bends):
    put_model(folder, architecture, **bends)
    policy = load_policy(ModelConfig(path=str(folder)), temperature=0.7, device=CPU)
    row = TrainingRow(group=0, prompt_ids=(3, 4, 5), response_ids=(6, 7, 8, 1), advantage=1.0)
    batch = collate([row], pad_token_id=0, device=CPU)
    logits = policy.model(torch.tensor([row.prompt_ids + row.response_ids])).logits[0, 2:-1]
    expected = (logits.double() / 0.7).log_softmax(-1)[range(4), list(row.response_ids)]
    got = policy.token_logprobs(batch).logprobs
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_scores_the_same_alone_and_in_a_large_batch(folder, monkeypatch, dtype):
    config = ModelConfig(path=str(folder), compute_dtype=dtype)
    policy = load_policy(config, temperature=1.0, device=CPU)
    with torch.no_grad():
        policy.model.get_output_embeddings().weight.mul_(30.0)
    rows = [
        TrainingRow(
            group=0, prompt_ids=(3, 4), response_ids=tuple(range(5 + i, 69 + i)), advantage=1
        )
        for i in range(4)
    ]
    batches = [collate(rows[:n], pad_token_id=0, device=CPU) for n in (1, 4)]
    # Room for the logits of one row, not of four.
    monkeypatch.setattr("xrpo_fast.policy.MAX_LOGITS_BYTES", 4 * 64 * 128)
    alone, among = (policy.token_logprobs(batch).logprobs for batch in batches)
    assert alone.std() > 1
    torch.testing.assert_close(alone, among[:64], rtol=0, atol=1e-4)


def test_a_head_that_bends_logits_in_an_unknown_way_is_an_error(folder, monkeypatch):
    from transformers import LlamaForCausalLM

    plain = LlamaForCausalLM.forward

    def bent(self, *args, **kwargs):
        output = plain(self, *args, **kwargs)
        output.logits = output.logits * 1.5
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", bent)
    with pytest.raises(ModelError, match=r"model\.path: expected logits of the output head"):
        load_policy(ModelConfig(path=str(folder)), temperature=1.0, device=CPU)
