"""One optimizer update through a tiny Llama: no cut into micro-batches changes loss or gradient."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from xrpo_fast.batching import cut_mini_batches
from xrpo_fast.config import LossConfig, OptimConfig
from xrpo_fast.metrics import DeviceSums
from xrpo_fast.objectives import OBJECTIVES
from xrpo_fast.policy import Policy
from xrpo_fast.types import MiniBatch, TrainingRow
from xrpo_fast.update import Updater

VOCAB_SIZE = 61
MAX_RESPONSE_TOKENS = 16
GRADIENT_TOLERANCE = 1e-12
"""Of the largest gradient. Weights are float64 here, where the cuts agree to 5e-16; in float32 the
order of summation alone makes up to 3e-6."""
LOSS_TOLERANCE = 1e-6
"""The loss is summed for the metrics in float32."""


@pytest.fixture(scope="module")
def build_policy():
    """build_policy(seed) -> a tiny Llama in float64 as the policy to train."""
    from transformers import LlamaConfig, LlamaForCausalLM

    def build(seed: int = 0) -> Policy:
        torch.manual_seed(seed)
        model = (
            LlamaForCausalLM(
                LlamaConfig(
                    vocab_size=VOCAB_SIZE,
                    hidden_size=32,
                    intermediate_size=48,
                    num_hidden_layers=2,
                    num_attention_heads=2,
                    num_key_value_heads=1,
                    max_position_embeddings=64,
                    initializer_range=0.2,
                )
            )
            .double()
            .eval()
        )
        return Policy(
            model=model,
            tokenizer=SimpleNamespace(pad_token_id=0, eos_token_id=5),
            device=torch.device("cpu"),
            compute_dtype=torch.float32,
            temperature=0.8,
            path="",
        )

    return build


def ragged_rows(*, off_policy: bool = True) -> list[TrainingRow]:
    """Rows of four prompts of all lengths; every third has no advantage, one is empty."""
    rng = np.random.default_rng(0)
    rows = []
    for i, length in enumerate([1, 12, 3, 7, 0, 16, 2, 9, 5, 4, 11, 6]):
        rows.append(
            TrainingRow(
                group=i // 3,
                prompt_ids=tuple(rng.integers(1, VOCAB_SIZE, 2 + i % 4).tolist()),
                response_ids=tuple(rng.integers(1, VOCAB_SIZE, length).tolist()),
                advantage=0.0 if i % 3 == 2 else float(rng.normal()),
                token_weight=[1.0, 0.5, 2.0][i % 3],
                old_logprobs=rng.normal(-4, 0.5, length).astype(np.float32) if off_policy else None,
                sampler_logprobs=rng.normal(-4, 0.5, length).astype(np.float32),
            )
        )
    return rows


def one_update(policy: Policy, batch: MiniBatch, *, budget: int, reference=None, **loss):
    """(gradients by name, metrics) of one update of a fresh optimizer."""
    loss = {"clip_low": 0.2, "clip_high": 0.28, **loss}
    updater = Updater(
        policy=policy,
        reference=reference,
        loss=LossConfig(**loss),
        optim=OptimConfig(learning_rate=1e-12, max_grad_norm=1e9, micro_batch_tokens=budget),
        max_response_tokens=MAX_RESPONSE_TOKENS,
        sums=DeviceSums(),
    )
    seen: dict[str, torch.Tensor] = {}

    def keep(*_) -> None:
        for name, parameter in policy.model.named_parameters():
            assert parameter.grad is not None
            seen[name] = parameter.grad.clone()

    updater.fill_reference_logprobs(batch.rows)
    updater.optimizer.register_step_pre_hook(keep)
    updater.apply(batch)
    return seen, updater.read_metrics()


def assert_same_update(first, second) -> None:
    """Gradients and loss agree to their tolerances."""
    (gradients, metrics), (others, other_metrics) = first, second
    largest = max(gradient.abs().max().item() for gradient in gradients.values())
    assert largest > 1e-3
    for name, gradient in gradients.items():
        gap = (gradient - others[name]).abs().max().item()
        assert gap <= GRADIENT_TOLERANCE * largest, f"{name}: {gap} of {largest}"
    assert metrics["loss"] == pytest.approx(
        other_metrics["loss"], rel=LOSS_TOLERANCE, abs=LOSS_TOLERANCE
    )


VARIANTS = {
    "plain": {},
    "dual_clip": {"dual_clip": 3.0},
    "tis": {"mismatch": "tis"},
    "kl": {"kl_weight": 0.1},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_no_cut_changes_loss_or_gradient(build_policy, objective, variant):
    """One row at a time, a few, and all at once."""
    options = {"objective": objective, **VARIANTS[variant]}
    has_kl = "kl_weight" in options
    updates = []
    for budget in (1, 45, 10_000):
        (batch,) = cut_mini_batches(ragged_rows(), [range(4)], keep_all=has_kl)
        reference = build_policy(1) if has_kl else None
        updates.append(
            one_update(build_policy(), batch, budget=budget, reference=reference, **options)
        )
    for other in updates[:-1]:
        assert_same_update(updates[-1], other)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_rows_without_gradient_may_be_left_out(build_policy, objective):
    """The denominators count them all the same."""
    kept, dropped = (
        cut_mini_batches(ragged_rows(), [range(4)], keep_all=keep_all)[0]
        for keep_all in (True, False)
    )
    assert len(dropped.rows) < len(kept.rows)
    updates = [
        one_update(build_policy(), batch, budget=64, objective=objective)
        for batch in (kept, dropped)
    ]
    assert_same_update(*updates)


@pytest.mark.parametrize("other", ["gspo", "gspo_token"])
def test_one_update_per_batch_makes_gspo_and_grpo_the_same(build_policy, other):
    (batch,) = cut_mini_batches(ragged_rows(off_policy=False), [range(4)], keep_all=False)
    updates = [
        one_update(build_policy(), batch, budget=64, objective=name) for name in ("grpo", other)
    ]
    for name, gradient in updates[0][0].items():
        torch.testing.assert_close(gradient, updates[1][0][name], rtol=0, atol=1e-12)


def test_denominators_matter(build_policy):
    """Otherwise leaving rows out could not be told from counting them."""
    (batch,) = cut_mini_batches(ragged_rows(), [range(4)], keep_all=False)
    smaller = MiniBatch(rows=batch.rows, num_rows=batch.num_rows / 2, num_tokens=batch.num_tokens)
    whole, half = (one_update(build_policy(), b, budget=64)[0] for b in (batch, smaller))
    for name, gradient in whole.items():
        torch.testing.assert_close(2 * gradient, half[name], rtol=0, atol=1e-12)


def test_log_probs_are_those_of_the_model_on_each_row_alone(build_policy):
    policy, rows = build_policy(), [row for row in ragged_rows() if row.response_ids]
    updater = Updater(
        policy=policy,
        reference=None,
        loss=LossConfig(),
        optim=OptimConfig(micro_batch_tokens=45),
        max_response_tokens=MAX_RESPONSE_TOKENS,
        sums=DeviceSums(),
    )
    updater.fill_old_logprobs(rows)
    for row in rows:
        tokens = torch.tensor([row.prompt_ids + row.response_ids])
        with torch.no_grad():
            logits = policy.model(tokens).logits[0, len(row.prompt_ids) - 1 : -1]
        truth = torch.log_softmax(logits.double() / policy.temperature, -1)
        expected = truth.gather(1, torch.tensor(row.response_ids)[:, None]).squeeze(1)
        np.testing.assert_allclose(row.old_logprobs, expected, atol=1e-10)


def test_a_batch_without_gradient_updates_nothing(build_policy):
    policy = build_policy()
    before = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}
    updater = Updater(
        policy=policy,
        reference=None,
        loss=LossConfig(),
        optim=OptimConfig(learning_rate=0.1),
        max_response_tokens=MAX_RESPONSE_TOKENS,
        sums=DeviceSums(),
    )
    updater.apply(MiniBatch(rows=[], num_rows=4.0, num_tokens=9.0))
    assert updater.num_updates == 0
    after = policy.model.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_learning_rate_rises_linearly_and_stays(build_policy):
    updater = Updater(
        policy=build_policy(),
        reference=None,
        loss=LossConfig(),
        optim=OptimConfig(learning_rate=1e-3, warmup_steps=4),
        max_response_tokens=MAX_RESPONSE_TOKENS,
        sums=DeviceSums(),
    )
    rates = []
    for _ in range(6):
        rates.append(updater.learning_rate(updater.num_updates))
        (batch,) = cut_mini_batches(ragged_rows(), [range(4)], keep_all=False)
        updater.apply(batch)
    assert rates == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3, 1e-3])
