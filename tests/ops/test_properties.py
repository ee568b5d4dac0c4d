"""Properties that hold for all inputs (hypothesis). T tokens, S rows, P groups, V vocabulary."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from xrpo_fast.ops import group_advantages, sequence_logprobs, token_logprobs, xrpo_advantages

few = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
seeds = st.integers(0, 2**31 - 1)
sizes = st.lists(st.integers(0, 9), min_size=1, max_size=8)


@pytest.fixture(params=["torch", "cpp"])
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def rollouts(seed: int, groups: list[int]) -> tuple[Tensor, Tensor]:
    """Binary rewards with some unscored, and scores."""
    source = generator(seed)
    num_seqs = sum(groups)
    rewards = (torch.rand(num_seqs, generator=source) < 0.5).float()
    rewards[torch.rand(num_seqs, generator=source) < 0.1] = float("nan")
    return rewards, torch.randn(num_seqs, generator=source) - 1


def assert_same(one: tuple, other: tuple, tolerance: float = 1e-6) -> None:
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


@given(seed=seeds, shift=st.floats(-100, 100), columns=st.integers(1, 50))
@few
def test_logprobs_do_not_change_when_a_row_is_shifted(backend, seed, shift, columns):
    logits = torch.randn(3, columns, generator=generator(seed), dtype=torch.float64)
    labels = torch.arange(3) % columns
    options = {"return_entropy": True, "backend": backend}
    one = token_logprobs(logits, labels, **options)
    other = token_logprobs(logits + shift, labels, **options)
    assert_same(one, other, 1e-10)


@given(seed=seeds, columns=st.integers(1, 300), temperature=st.floats(0.05, 20))
@few
def test_logprobs_are_a_distribution(backend, seed, columns, temperature):
    logits = 4 * torch.randn(1, columns, generator=generator(seed))
    labels = torch.arange(columns)
    result = token_logprobs(
        logits.expand(columns, columns),
        labels,
        temperature=temperature,
        return_entropy=True,
        backend=backend,
    )
    logp = result.logprobs.double()
    torch.testing.assert_close(logp.exp().sum().item(), 1.0, rtol=2e-5, atol=0)
    entropy = -(logp.exp() * logp).sum()
    torch.testing.assert_close(result.entropy[0].double(), entropy, rtol=1e-4, atol=1e-5)


@given(seed=seeds, scored=st.lists(st.booleans(), min_size=1, max_size=12))
@few
def test_unscored_tokens_change_nothing(seed, scored):
    mask = torch.tensor(scored)
    logits = torch.randn(len(scored), 17, generator=generator(seed))
    labels = torch.randint(0, 17, (len(scored),), generator=generator(seed))
    everything = token_logprobs(logits, labels, mask=mask, return_entropy=True)
    only = token_logprobs(logits[mask], labels[mask], return_entropy=True)
    assert torch.equal(everything.logprobs[mask], only.logprobs)
    assert torch.equal(everything.entropy[mask], only.entropy)
    assert torch.equal(everything.logprobs[~mask], torch.zeros(int((~mask).sum())))


@given(seed=seeds, order=st.permutations(list(range(9))))
@few
def test_rows_of_logits_are_independent_bitwise(seed, order):
    logits = torch.randn(9, 130, generator=generator(seed)).bfloat16()
    labels = torch.randint(0, 130, (9,), generator=generator(seed))
    straight = token_logprobs(logits, labels)
    permuted = token_logprobs(logits[list(order)], labels[list(order)])
    assert torch.equal(permuted.logprobs, straight.logprobs[list(order)])


@given(seed=seeds, groups=sizes, shift=st.integers(-64, 64))
@few
def test_advantages_do_not_change_when_rewards_are_shifted(backend, seed, groups, shift):
    rewards, _ = rollouts(seed, groups)
    cu_groups = offsets(groups)
    one = group_advantages(rewards, cu_groups=cu_groups, backend=backend)
    other = group_advantages(rewards + shift, cu_groups=cu_groups, backend=backend)
    assert_same((one.advantages, one.std), (other.advantages, other.std))


@given(seed=seeds, groups=sizes)
@few
def test_advantages_of_a_group_sum_to_zero(backend, seed, groups):
    rewards, _ = rollouts(seed, groups)
    result = group_advantages(rewards.double(), cu_groups=offsets(groups), backend=backend)
    for part in result.advantages.split(groups):
        assert abs(part.sum().item()) < 1e-9


@given(seed=seeds, groups=sizes, value=st.floats(-10, 10, width=32))
@few
def test_a_group_of_equal_rewards_is_exactly_zero(backend, seed, groups, value):
    rewards = torch.full((sum(groups),), value)
    rewards[torch.rand(sum(groups), generator=generator(seed)) < 0.2] = float("nan")
    result = group_advantages(rewards, cu_groups=offsets(groups), backend=backend)
    assert torch.equal(result.advantages, torch.zeros_like(rewards))


@given(seed=seeds, groups=sizes, data=st.data())
@few
def test_order_of_rows_and_groups_does_not_matter(backend, seed, groups, data):
    rewards, scores = rollouts(seed, groups)
    ids = torch.repeat_interleave(torch.arange(len(groups)), torch.tensor(groups))
    order = data.draw(st.permutations(list(range(len(rewards)))))
    names = torch.tensor(data.draw(st.permutations(list(range(len(groups)))))) * 31 - 5
    straight = xrpo_advantages(rewards, scores=scores, cu_groups=offsets(groups), backend=backend)
    index = torch.tensor(order, dtype=torch.int64)
    permuted = xrpo_advantages(
        rewards[index], scores=scores[index], group_ids=names[ids[index]], backend=backend
    )
    assert_same(tuple(x[index] for x in straight), permuted)


@given(seed=seeds, groups=sizes)
@few
def test_a_group_does_not_see_the_others(seed, groups):
    rewards, scores = rollouts(seed, groups)
    together = xrpo_advantages(rewards, scores=scores, cu_groups=offsets(groups))
    for i, (a, b) in enumerate(zip(offsets(groups)[:-1], offsets(groups)[1:], strict=True)):
        alone = xrpo_advantages(
            rewards[a:b], scores=scores[a:b], cu_groups=torch.tensor([0, groups[i]])
        )
        for whole, part in zip(together, alone, strict=True):
            assert torch.equal(whole[a:b].nan_to_num(7.0), part.nan_to_num(7.0))


@given(seed=seeds, groups=sizes, weight=st.floats(0, 5), clip=st.floats(0, 2))
@few
def test_bonus_only_helps_and_is_bounded(backend, seed, groups, weight, clip):
    rewards, scores = rollouts(seed, groups)
    result = xrpo_advantages(
        rewards,
        scores=scores,
        cu_groups=offsets(groups),
        novelty_weight=weight,
        novelty_clip=clip,
        backend=backend,
    )
    assert bool((result.bonus >= 0).all())
    assert bool((result.bonus <= clip * result.base.clamp(min=0) + 1e-6).all())
    assert bool((result.bonus[~(rewards >= 1)] == 0).all())
    torch.testing.assert_close(result.advantages, result.base + result.bonus)


@given(seed=seeds, lengths=sizes, cut=st.integers(0, 8))
@few
def test_scores_do_not_depend_on_the_packing(seed, lengths, cut):
    tokens = torch.randn(sum(lengths), generator=generator(seed))
    whole = sequence_logprobs(tokens, offsets(lengths))
    cut = min(cut, len(lengths))
    place = sum(lengths[:cut])
    first = sequence_logprobs(tokens[:place], offsets(lengths[:cut]))
    second = sequence_logprobs(tokens[place:], offsets(lengths[cut:]))
    assert torch.equal(whole.scores, torch.cat([first.scores, second.scores]))
    assert torch.equal(whole.lengths, torch.cat([first.lengths, second.lengths]))
