"""Every loss against its equation, written out row by row in float64 with plain loops."""

import math

import pytest
import torch

from xrpo_fast.objectives import OBJECTIVES
from xrpo_fast.objectives.common import LossInputs, LossScale, k3_terms

NAMES = tuple(OBJECTIVES)
LENGTHS = (5, 1, 13, 2, 7, 3)
CLIP_LOW, CLIP_HIGH, MAX_RESPONSE_TOKENS = 0.2, 0.28, 16
TOLERANCE = 1e-10


def random_inputs(seed: int, *, is_corrected: bool = False, shaped_rows: tuple = ()) -> LossInputs:
    """Ragged rows with ratios well outside the clip range, both signs of advantage, and weights."""
    generator = torch.Generator().manual_seed(seed)

    def normal(count: int) -> torch.Tensor:
        return torch.randn(count, generator=generator, dtype=torch.float64)

    lengths = torch.tensor(LENGTHS, dtype=torch.float64)
    row_index = torch.repeat_interleave(torch.arange(len(LENGTHS)), lengths.long())
    num_tokens = len(row_index)
    old = -normal(num_tokens).abs() - 0.05
    new = (old + 0.5 * normal(num_tokens) + 0.3 * normal(len(LENGTHS))[row_index]).clamp(max=-1e-3)
    return LossInputs(
        token_logprobs=new.requires_grad_(),
        old_logprobs=old,
        advantages=normal(len(LENGTHS))[row_index],
        row_weights=0.5 + normal(len(LENGTHS)).abs(),
        row_index=row_index,
        lengths=lengths,
        mismatch_weights=normal(num_tokens).exp().clamp(max=2.0) if is_corrected else None,
        is_shaped=torch.isin(row_index, torch.tensor(shaped_rows)) if shaped_rows else None,
    )


def scale_of(inputs: LossInputs, *, dual_clip: float = 0.0) -> LossScale:
    """Denominators of a mini-batch that holds more rows than the micro-batch at hand."""
    return LossScale(
        clip_low=CLIP_LOW,
        clip_high=CLIP_HIGH,
        dual_clip=dual_clip,
        num_rows=float(inputs.row_weights.sum()) + 2.5,
        num_tokens=float((inputs.row_weights * inputs.lengths).sum()) + 17.0,
        max_response_tokens=MAX_RESPONSE_TOKENS,
    )


def transcribed_loss(name: str, inputs: LossInputs, scale: LossScale) -> torch.Tensor:
    """The equations, one row and one token at a time."""
    total = torch.zeros((), dtype=torch.float64)
    for row, length in enumerate(LENGTHS):
        tokens = [t for t in range(len(inputs.row_index)) if int(inputs.row_index[t]) == row]
        log_ratios = [inputs.token_logprobs[t] - inputs.old_logprobs[t] for t in tokens]
        sequence_ratio = torch.exp(sum(log_ratios) / length)
        terms = []
        for t, log_ratio in zip(tokens, log_ratios, strict=True):
            probability = torch.exp(inputs.token_logprobs[t])
            if name == "gspo":
                ratio = sequence_ratio
            elif name == "gspo_token":
                ratio = sequence_ratio.detach() * probability / probability.detach()
            else:
                ratio = torch.exp(log_ratio)
            advantage = inputs.advantages[t]
            is_shaped = inputs.is_shaped is not None and bool(inputs.is_shaped[t])
            if is_shaped:
                term = probability / (probability + 0.1) * advantage
            else:
                clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
                term = torch.min(ratio * advantage, clipped * advantage)
                if scale.dual_clip and advantage < 0:
                    term = torch.max(term, scale.dual_clip * advantage)
            if inputs.mismatch_weights is not None:
                term = term * inputs.mismatch_weights[t]
            terms.append(term)
        row_sum = inputs.row_weights[row] * sum(terms)
        total = (
            total
            - {
                "grpo": row_sum / length / scale.num_rows,
                "gspo": row_sum / length / scale.num_rows,
                "gspo_token": row_sum / length / scale.num_rows,
                "dr_grpo": row_sum / MAX_RESPONSE_TOKENS / scale.num_rows,
                "dapo": row_sum / scale.num_tokens,
            }[name]
        )
    return total


VARIANTS = {
    "plain": {},
    "dual_clip": {"dual_clip": 1.5},
    "shaped": {"shaped_rows": (0, 3)},
    "tis": {"is_corrected": True},
    "all": {"dual_clip": 1.5, "shaped_rows": (2,), "is_corrected": True},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradient_are_those_of_the_equation(name, variant):
    options = dict(VARIANTS[variant])
    dual_clip = options.pop("dual_clip", 0.0)
    for seed in range(3):
        inputs = random_inputs(seed, **options)
        scale = scale_of(inputs, dual_clip=dual_clip)
        loss = OBJECTIVES[name].loss(inputs, scale).loss
        truth = transcribed_loss(name, inputs, scale)
        (gradient,) = torch.autograd.grad(loss, inputs.token_logprobs)
        (true_gradient,) = torch.autograd.grad(truth, inputs.token_logprobs)
        assert loss.item() == pytest.approx(truth.item(), abs=TOLERANCE)
        torch.testing.assert_close(gradient, true_gradient, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("variant", ["dual_clip", "shaped", "tis"])
def test_each_option_changes_the_loss(variant):
    """Otherwise the comparison with the equation would say nothing about the option."""
    options = dict(VARIANTS[variant])
    dual_clip = options.pop("dual_clip", 0.0)
    plain, changed = random_inputs(0), random_inputs(0, **options)
    before = OBJECTIVES["grpo"].loss(plain, scale_of(plain)).loss
    after = OBJECTIVES["grpo"].loss(changed, scale_of(changed, dual_clip=dual_clip)).loss
    assert abs(before.item() - after.item()) > 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_clip_counts_are_the_tokens_held_at_a_bound(name):
    inputs = random_inputs(1)
    output = OBJECTIVES[name].loss(inputs, scale_of(inputs))
    log_ratio = (inputs.token_logprobs - inputs.old_logprobs).detach()
    if name.startswith("gspo"):
        means = [log_ratio[inputs.row_index == row].mean() for row in range(len(LENGTHS))]
        log_ratio = torch.stack(means)[inputs.row_index]
    ratio = log_ratio.exp()
    low = int(((ratio < 1 - CLIP_LOW) & (inputs.advantages < 0)).sum())
    high = int(((ratio > 1 + CLIP_HIGH) & (inputs.advantages > 0)).sum())
    assert (output.clipped_low.item(), output.clipped_high.item()) == (low, high)
    assert low + high > 0


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo"])
def test_clipped_tokens_have_no_gradient(name):
    inputs = random_inputs(1)
    loss = OBJECTIVES[name].loss(inputs, scale_of(inputs)).loss
    (gradient,) = torch.autograd.grad(loss, inputs.token_logprobs)
    ratio = (inputs.token_logprobs - inputs.old_logprobs).exp()
    held = ((ratio < 1 - CLIP_LOW) & (inputs.advantages < 0)) | (
        (ratio > 1 + CLIP_HIGH) & (inputs.advantages > 0)
    )
    assert held.any()
    assert (gradient[held] == 0).all()
    assert (gradient[~held] != 0).all()


@pytest.mark.parametrize("name", ["gspo", "gspo_token"])
def test_one_update_makes_gspo_and_grpo_the_same(name):
    """With old = new every ratio is 1 and only the mean over tokens is left."""
    inputs = random_inputs(2)
    on_policy = LossInputs(
        token_logprobs=inputs.token_logprobs,
        old_logprobs=inputs.token_logprobs.detach(),
        advantages=inputs.advantages,
        row_weights=inputs.row_weights,
        row_index=inputs.row_index,
        lengths=inputs.lengths,
    )
    scale = scale_of(on_policy)
    gradients = [
        torch.autograd.grad(OBJECTIVES[which].loss(on_policy, scale).loss, inputs.token_logprobs)[0]
        for which in ("grpo", name)
    ]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-15)


@pytest.mark.parametrize("name", NAMES)
def test_ratio_one_gives_the_plain_policy_gradient(name):
    inputs = random_inputs(3)
    on_policy = LossInputs(
        token_logprobs=inputs.token_logprobs,
        old_logprobs=inputs.token_logprobs.detach(),
        advantages=inputs.advantages,
        row_weights=inputs.row_weights,
        row_index=inputs.row_index,
        lengths=inputs.lengths,
    )
    scale = scale_of(on_policy)
    (gradient,) = torch.autograd.grad(
        OBJECTIVES[name].loss(on_policy, scale).loss, inputs.token_logprobs
    )
    per_token = {
        "dapo": torch.ones_like(inputs.advantages) / scale.num_tokens,
        "dr_grpo": torch.ones_like(inputs.advantages) / scale.num_rows / MAX_RESPONSE_TOKENS,
    }.get(name, 1 / inputs.lengths[inputs.row_index] / scale.num_rows)
    expected = -inputs.advantages * inputs.row_weights[inputs.row_index] * per_token
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize("name", NAMES)
def test_weightless_rows_contribute_nothing(name):
    inputs = random_inputs(4)
    weights = inputs.row_weights.clone()
    weights[2] = 0.0
    masked = LossInputs(
        token_logprobs=inputs.token_logprobs,
        old_logprobs=inputs.old_logprobs,
        advantages=inputs.advantages,
        row_weights=weights,
        row_index=inputs.row_index,
        lengths=inputs.lengths,
    )
    scale = scale_of(masked)
    loss = OBJECTIVES[name].loss(masked, scale).loss
    (gradient,) = torch.autograd.grad(loss, inputs.token_logprobs)
    kept = inputs.row_index != 2
    assert (gradient[~kept] == 0).all()
    others = LossInputs(
        token_logprobs=inputs.token_logprobs.detach()[kept],
        old_logprobs=inputs.old_logprobs[kept],
        advantages=inputs.advantages[kept],
        row_weights=weights[[0, 1, 3, 4, 5]],
        row_index=torch.repeat_interleave(torch.arange(5), torch.tensor([5, 1, 2, 7, 3])),
        lengths=inputs.lengths[[0, 1, 3, 4, 5]],
    )
    alone = OBJECTIVES[name].loss(others, scale).loss
    assert loss.item() == pytest.approx(alone.item(), abs=TOLERANCE)


def test_dual_clip_bounds_the_loss_of_a_token_that_became_likely():
    inputs = LossInputs(
        token_logprobs=torch.tensor([-0.1], dtype=torch.float64, requires_grad=True),
        old_logprobs=torch.tensor([-5.1], dtype=torch.float64),
        advantages=torch.tensor([-2.0], dtype=torch.float64),
        row_weights=torch.ones(1, dtype=torch.float64),
        row_index=torch.zeros(1, dtype=torch.long),
        lengths=torch.ones(1, dtype=torch.float64),
    )
    scale = LossScale(
        clip_low=0.2,
        clip_high=0.2,
        dual_clip=10.0,
        num_rows=1.0,
        num_tokens=1.0,
        max_response_tokens=1,
    )
    loss = OBJECTIVES["dapo"].loss(inputs, scale).loss
    assert loss.item() == pytest.approx(20.0), "10 times abs(A), where the ratio alone gives 297"
    loss.backward()
    assert inputs.token_logprobs.grad is not None
    assert inputs.token_logprobs.grad.item() == 0.0


def test_k3_is_the_closed_form_and_its_mean_is_the_divergence():
    own, reference = math.log(0.3), math.log(0.6)
    term = k3_terms(*torch.tensor([[own], [reference]], dtype=torch.float64))
    assert term.item() == pytest.approx(0.6 / 0.3 - math.log(0.6 / 0.3) - 1, abs=1e-12)
    p = torch.softmax(torch.tensor([0.1, 1.2, -0.7, 0.4], dtype=torch.float64), 0)
    q = torch.softmax(torch.tensor([0.5, 0.3, 0.2, -0.1], dtype=torch.float64), 0)
    terms = k3_terms(p.log(), q.log())
    assert (terms >= 0).all()
    expected = (p * (p / q).log()).sum()
    assert (p * terms).sum().item() == pytest.approx(expected.item(), abs=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_aggregate_is_the_mean_that_the_loss_takes(name):
    """A KL term of 1 per token and a policy term of 1 per token weigh the same."""
    inputs = random_inputs(5)
    ones = LossInputs(
        token_logprobs=inputs.token_logprobs,
        old_logprobs=inputs.token_logprobs.detach(),
        advantages=torch.full_like(inputs.advantages, -1.0),
        row_weights=inputs.row_weights,
        row_index=inputs.row_index,
        lengths=inputs.lengths,
    )
    scale = scale_of(ones)
    objective = OBJECTIVES[name]
    terms = torch.ones_like(inputs.advantages)
    aggregated = objective.aggregate(terms, ones, scale)
    assert objective.loss(ones, scale).loss.item() == pytest.approx(aggregated.item(), abs=1e-12)
