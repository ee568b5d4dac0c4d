"""group_advantages, xrpo_advantages and sequence_logprobs. P groups, S rows, T tokens, L padded."""

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from xrpo_fast.ops import group_advantages, last_backend, sequence_logprobs, xrpo_advantages

# ops.md: score, mean, std, advantage.
CLOSE = {"rtol": 1e-6, "atol": 1e-6, "equal_nan": True}
NAN = float("nan")


def xrpo_by_hand(
    rewards: list[float],
    groups: list[list[int]],
    tokens: list[list[float]],
    correct: list[bool],
    exclude: list[bool],
    *,
    weight: float = 2.5,
    clip: float = 0.5,
    scale: str = "group",
    ddof: int = 1,
    eps: float = 1e-6,
) -> dict[str, list[float]]:
    """The definition, row by row, in Python floats."""
    size = len(rewards)
    names = ("advantages", "base", "bonus", "eta", "scores", "mean", "std")
    out = {name: [0.0] * size for name in names}

    def spread(values: list[float]) -> float:
        mean = math.fsum(values) / len(values)
        squares = math.fsum((v - mean) ** 2 for v in values)
        return math.sqrt(squares / (len(values) - ddof)) if len(values) > ddof else 0.0

    every = [r for r in rewards if not math.isnan(r)]
    for rows in groups:
        scored = [r for r in rows if not math.isnan(rewards[r])]
        values = [rewards[r] for r in scored]
        mean = math.fsum(values) / len(values) if values else NAN
        std = spread(every if scale == "batch" else values) if values else NAN
        score = {r: math.fsum(tokens[r]) / len(tokens[r]) if tokens[r] else 0.0 for r in rows}
        part = [r for r in scored if tokens[r] and math.isfinite(score[r]) and not exclude[r]]
        center = math.fsum(score[r] for r in part) / len(part) if part else NAN
        for r in rows:
            base = 0.0
            if r in scored and rewards[r] != mean:
                base = (rewards[r] - mean) / (1.0 if scale == "none" else std + eps)
            eta = math.exp(score[r] - center) if r in part else 1.0
            bonus = 0.0
            if r in part and correct[r] and base > 0:
                bonus = min(max(weight * (1 - eta), 0.0), clip * base)
            row = (base + bonus, base, bonus, eta, score[r], mean, std)
            for name, value in zip(names, row, strict=True):
                out[name][r] = value
    return out


def ragged(seed: int, num_seqs: int) -> dict:
    """Random groups (some empty), rewards (some NaN), tokens (some rows without), flags."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    sizes, left = [0], num_seqs
    while left > 0:
        sizes.append(min(left, int(uniform(1) * 9)))
        left -= sizes[-1]
    lengths = (uniform(num_seqs) * 7).long()
    rewards = torch.where(uniform(num_seqs) < 0.4, 1.0, uniform(num_seqs).round(decimals=1))
    rewards[uniform(num_seqs) < 0.1] = NAN
    return {
        "sizes": sizes,
        "cu_groups": torch.tensor([0, *sizes]).cumsum(0),
        "lengths": lengths,
        "cu_seqlens": torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
        "tokens": -3 * uniform(int(lengths.sum())),
        "rewards": rewards,
        "correct": uniform(num_seqs) < 0.5,
        "exclude": uniform(num_seqs) < 0.15,
    }


def to(device: str, *tensors: Tensor) -> list[Tensor]:
    return [t.to(device) for t in tensors]


def assert_rows(result, exact: dict[str, list[float]]) -> None:
    for name, values in exact.items():
        ours = getattr(result, name).cpu().double()
        torch.testing.assert_close(
            ours,
            torch.tensor(values, dtype=torch.float64),
            msg=lambda text, name=name: f"{name}: {text}",
            **CLOSE,
        )


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("ddof", [0, 1], ids=["ddof0", "ddof1"])
@pytest.mark.parametrize(
    "num_seqs", [1, 7, 64, pytest.param(257, marks=pytest.mark.large)], ids=lambda n: f"S{n}"
)
def test_xrpo_matches_the_definition(num_seqs, ddof, scale, backend, device):
    data = ragged(num_seqs, num_seqs)
    tokens = [t.tolist() for t in data["tokens"].double().split(data["lengths"].tolist())]
    starts = data["cu_groups"].tolist()
    groups = [list(range(a, b)) for a, b in pairwise(starts)]
    exact = xrpo_by_hand(
        data["rewards"].double().tolist(),
        groups,
        tokens,
        data["correct"].tolist(),
        data["exclude"].tolist(),
        scale=scale,
        ddof=ddof,
    )
    rewards, packed, cu_seqlens, cu_groups, correct, exclude = to(
        device,
        *(data[k] for k in ("rewards", "tokens", "cu_seqlens", "cu_groups", "correct", "exclude")),
    )
    options = {
        "correct": correct,
        "exclude_from_novelty": exclude,
        "scale": scale,
        "ddof": ddof,
        "backend": backend,
    }
    by_tokens = xrpo_advantages(
        rewards, token_logprobs=packed, cu_seqlens=cu_seqlens, cu_groups=cu_groups, **options
    )
    assert last_backend() == backend
    assert_rows(by_tokens, exact)

    width = max(1, int(data["lengths"].max()))
    mask = torch.arange(width) < data["lengths"][:, None]
    padded = torch.full((num_seqs, width), NAN)
    padded[mask] = data["tokens"]
    padded, mask = to(device, padded, mask)
    by_mask = xrpo_advantages(
        rewards, token_logprobs=padded, mask=mask, cu_groups=cu_groups.int(), **options
    )
    assert_rows(by_mask, exact)

    ids = torch.repeat_interleave(
        torch.arange(len(groups)) * 7919 % 1009 - 500, torch.tensor(data["sizes"])
    )
    order = torch.randperm(num_seqs, generator=torch.Generator().manual_seed(3))
    shuffled = {
        **options,
        "correct": correct[order.to(device)],
        "exclude_from_novelty": exclude[order.to(device)],
    }
    by_ids = xrpo_advantages(
        rewards[order.to(device)],
        token_logprobs=padded[order.to(device)],
        mask=mask[order.to(device)],
        group_ids=ids[order].to(device),
        **shuffled,
    )
    assert_rows(by_ids, {name: [rows[i] for i in order] for name, rows in exact.items()})


def test_scores_and_tokens_agree(backend, device):
    data = ragged(5, 40)
    rewards, tokens, cu_seqlens, cu_groups = to(
        device, *(data[k] for k in ("rewards", "tokens", "cu_seqlens", "cu_groups"))
    )
    scores, lengths = sequence_logprobs(tokens, cu_seqlens, backend=backend)
    by_scores = xrpo_advantages(
        rewards,
        scores=scores,
        cu_groups=cu_groups,
        exclude_from_novelty=lengths == 0,
        backend=backend,
    )
    by_tokens = xrpo_advantages(
        rewards, token_logprobs=tokens, cu_seqlens=cu_seqlens, cu_groups=cu_groups, backend=backend
    )
    ids = torch.repeat_interleave(
        torch.arange(cu_groups.numel() - 1, device=device), cu_groups.diff()
    )
    by_ids = xrpo_advantages(
        rewards, token_logprobs=tokens, cu_seqlens=cu_seqlens, group_ids=ids, backend=backend
    )
    for one, other, third in zip(by_scores, by_tokens, by_ids, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)
        torch.testing.assert_close(one, third, **CLOSE)


@pytest.mark.parametrize("value", [0.35, 1e-5, 0.2, 1e8, -3.0])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_equal_rewards_give_exactly_zero(value, scale, backend, device):
    # NeMo-RL #4161, verl #4598: E[x^2] - E[x]^2 leaves a residue that becomes the std.
    for size in (1, 2, 7, 100):
        rewards = torch.full((size,), value, device=device)
        cu_groups = torch.tensor([0, size], device=device)
        result = group_advantages(rewards, cu_groups=cu_groups, scale=scale, backend=backend)
        assert torch.equal(result.advantages, torch.zeros_like(rewards))
        assert torch.equal(result.mean, rewards)
        assert result.std.tolist() == [0.0] * size
        exact_eps = group_advantages(
            rewards, cu_groups=cu_groups, scale=scale, eps=0.0, backend=backend
        )
        assert torch.equal(exact_eps.advantages, torch.zeros_like(rewards))


def test_seven_against_one(backend, device):
    # NeMo-RL #4161: 7 rewards of 0.35 and one of 0.95 gave an advantage near 4000.
    rewards = torch.tensor([0.35] * 7 + [0.95], device=device)
    result = group_advantages(
        rewards, cu_groups=torch.tensor([0, 8], device=device), backend=backend
    )
    values = rewards.double()
    exact = (values - values.mean()) / (values.std() + 1e-6)
    torch.testing.assert_close(result.advantages.double(), exact, **CLOSE)


def test_tiny_differences_survive(backend, device):
    # verl #6348: rewards 1 + 1e-5 k.
    rewards = 1 + 1e-5 * torch.arange(5, device=device, dtype=torch.float64)
    if backend == "triton":
        rewards = rewards.float()
    result = group_advantages(
        rewards, cu_groups=torch.tensor([0, 5], device=device), backend=backend
    )
    values = rewards.double()
    exact = (values - values.mean()) / (values.std() + 1e-6)
    torch.testing.assert_close(result.advantages.double(), exact, **CLOSE)


def test_group_statistics_and_counts(backend, device):
    rewards = torch.tensor([1.0, NAN, 0.0, 0.5, NAN, 1.0], device=device)
    cu_groups = torch.tensor([0, 3, 3, 5, 6], device=device)
    result = group_advantages(rewards, cu_groups=cu_groups, backend=backend)
    root = math.sqrt(0.5)
    expected = [0.5 / (root + 1e-6), 0.0, -0.5 / (root + 1e-6), 0.0, 0.0, 0.0]
    torch.testing.assert_close(result.advantages.cpu(), torch.tensor(expected), **CLOSE)
    torch.testing.assert_close(
        result.mean.cpu(), torch.tensor([0.5, 0.5, 0.5, 0.5, 0.5, 1.0]), **CLOSE
    )
    torch.testing.assert_close(
        result.std.cpu(), torch.tensor([root, root, root, 0.0, 0.0, 0.0]), **CLOSE
    )
    assert result.count.tolist() == [2, 2, 2, 1, 1, 1]
    assert result.count.dtype == torch.int64
    ids = torch.tensor([9, 9, 9, -4, -4, 100], device=device)
    by_ids = group_advantages(rewards, group_ids=ids, backend=backend)
    for one, other in zip(result, by_ids, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


def test_group_without_a_scored_row(backend, device):
    rewards = torch.tensor([NAN, NAN, 1.0, 0.0], device=device)
    result = xrpo_advantages(
        rewards,
        scores=torch.tensor([-1.0, -2.0, -1.0, -2.0], device=device),
        cu_groups=torch.tensor([0, 2, 4], device=device),
        backend=backend,
    )
    assert result.advantages[:2].tolist() == [0.0, 0.0]
    assert result.eta[:2].tolist() == [1.0, 1.0]
    assert result.mean[:2].isnan().all()
    assert result.std[:2].isnan().all()


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int32, torch.bool, torch.bfloat16, torch.float16]
)
def test_rewards_are_promoted(dtype, backend, device):
    rewards = torch.tensor([1, 0, 0, 1, 1], device=device).to(dtype)
    cu_groups = torch.tensor([0, 5], device=device)
    result = group_advantages(rewards, cu_groups=cu_groups, backend=backend)
    exact = group_advantages(rewards.float(), cu_groups=cu_groups, backend=backend)
    assert result.advantages.dtype == torch.float32
    assert torch.equal(result.advantages, exact.advantages)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_full_reward_is_compared_in_the_dtype_of_rewards(dtype, backend, device):
    # 0.7 in float is less than 0.7 in double.
    rewards = torch.tensor([0.7, 0.0], device=device, dtype=dtype)
    result = xrpo_advantages(
        rewards,
        scores=torch.tensor([-2.0, -1.0], device=device),
        cu_groups=torch.tensor([0, 2], device=device),
        full_reward=0.7,
        backend=backend,
    )
    assert result.bonus[0] > 0


def test_float64_stays_float64(device):
    for backend in ("cpp", "torch"):
        data = ragged(11, 50)
        rewards = data["rewards"].double()
        result = xrpo_advantages(
            rewards,
            token_logprobs=data["tokens"].double(),
            cu_seqlens=data["cu_seqlens"],
            cu_groups=data["cu_groups"],
            backend=backend,
        )
        assert all(column.dtype == torch.float64 for column in result)
        tokens = [t.tolist() for t in data["tokens"].double().split(data["lengths"].tolist())]
        starts = data["cu_groups"].tolist()
        groups = [list(range(a, b)) for a, b in pairwise(starts)]
        correct = (rewards >= 1).tolist()
        exact = xrpo_by_hand(rewards.tolist(), groups, tokens, correct, [False] * 50)
        for name, values in exact.items():
            ours = getattr(result, name)
            torch.testing.assert_close(
                ours,
                torch.tensor(values, dtype=torch.float64),
                rtol=1e-10,
                atol=1e-10,
                equal_nan=True,
            )


@pytest.mark.parametrize("bad", [-float("inf"), float("inf"), NAN])
def test_scores_that_are_not_finite_take_no_part(bad, backend, device):
    rewards = torch.tensor([1.0, 1.0, 0.0, 0.0], device=device)
    cu_groups = torch.tensor([0, 4], device=device)
    scores = torch.tensor([-2.0, bad, -1.0, -1.5], device=device)
    result = xrpo_advantages(rewards, scores=scores, cu_groups=cu_groups, backend=backend)
    exact = math.exp(-2.0 + 1.5)
    torch.testing.assert_close(result.eta[0].item(), exact, **CLOSE)
    assert result.eta[1] == 1
    assert result.bonus[1] == 0
    assert result.advantages[1] == result.base[1]


def test_bonus_is_clipped_and_never_negative(backend, device):
    rewards = torch.tensor([1.0, 1.0, 1.0, 0.0], device=device)
    scores = torch.tensor([-9.0, -0.1, -2.0, -0.1], device=device)
    result = xrpo_advantages(
        rewards, scores=scores, cu_groups=torch.tensor([0, 4], device=device), backend=backend
    )
    torch.testing.assert_close(result.bonus[0], 0.5 * result.base[0], **CLOSE)
    assert result.bonus[1] == 0
    assert result.bonus[3] == 0
    assert result.base[3] < 0


def test_no_gradient_flows(backend, device):
    rewards = torch.tensor([1.0, 0.0], device=device, requires_grad=True)
    scores = torch.tensor([-2.0, -1.0], device=device, requires_grad=True)
    cu_groups = torch.tensor([0, 2], device=device)
    result = xrpo_advantages(rewards, scores=scores, cu_groups=cu_groups, backend=backend)
    assert not any(column.requires_grad for column in result)


def test_no_rows(backend, device):
    empty = torch.zeros(0, device=device)
    cu_groups = torch.zeros(1, dtype=torch.int64, device=device)
    for groups in ({"cu_groups": cu_groups}, {"group_ids": cu_groups[:0]}):
        result = xrpo_advantages(empty, scores=empty, backend=backend, **groups)
        assert [column.shape for column in result] == [(0,)] * 7
        assert group_advantages(empty, backend=backend, **groups).count.shape == (0,)


@pytest.mark.parametrize(
    "num_seqs", [5000, pytest.param(65_536, marks=pytest.mark.large)], ids=lambda n: f"S{n}"
)
def test_one_group_of_many_rows(num_seqs, backend, device):
    generator = torch.Generator().manual_seed(0)
    rewards = torch.rand(num_seqs, generator=generator).to(device)
    result = group_advantages(
        rewards, cu_groups=torch.tensor([0, num_seqs], device=device), backend=backend
    )
    values = rewards.double()
    exact = (values - values.mean()) / (values.std() + 1e-6)
    torch.testing.assert_close(result.advantages.double(), exact, **CLOSE)


@pytest.mark.large
def test_many_groups(backend, device):
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(0, 17, (8000,), generator=generator)
    cu_groups = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]).to(device)
    num_seqs = int(cu_groups[-1])
    rewards = (torch.rand(num_seqs, generator=generator) < 0.4).float().to(device)
    scores = torch.randn(num_seqs, generator=generator).to(device)
    ours = xrpo_advantages(rewards, scores=scores, cu_groups=cu_groups, backend=backend)
    exact = xrpo_advantages(
        rewards.double(), scores=scores.double(), cu_groups=cu_groups, backend="torch"
    )
    for column, truth in zip(ours, exact, strict=True):
        torch.testing.assert_close(column.double(), truth, **CLOSE)


@pytest.mark.parametrize("normalize", ["mean", "sum"])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
def test_sequence_logprobs(normalize, index_dtype, dtype, backend, device):
    data = ragged(2, 60)
    tokens = data["tokens"].to(dtype)
    x = tokens.to(device).requires_grad_()
    result = sequence_logprobs(
        x, data["cu_seqlens"].to(index_dtype).to(device), normalize=normalize, backend=backend
    )
    lengths = data["lengths"].tolist()
    sums = [math.fsum(t.tolist()) for t in tokens.double().split(lengths)]
    divisor = [max(n, 1) if normalize == "mean" else 1 for n in lengths]
    exact = torch.tensor([s / n for s, n in zip(sums, divisor, strict=True)], dtype=torch.float64)
    torch.testing.assert_close(result.scores.detach().cpu().double(), exact, **CLOSE)
    assert result.scores.dtype == torch.float32
    assert result.lengths.tolist() == lengths
    g = torch.randn(60, generator=torch.Generator().manual_seed(4))
    (dx,) = torch.autograd.grad(result.scores, x, g.to(device))
    expected = torch.repeat_interleave(g.double() / torch.tensor(divisor), data["lengths"])
    assert dx.dtype == dtype
    torch.testing.assert_close(dx.cpu(), expected.to(dtype), rtol=1e-6, atol=1e-7)


def test_sequence_logprobs_without_tokens(backend, device):
    cu_seqlens = torch.zeros(4, dtype=torch.int64, device=device)
    result = sequence_logprobs(torch.zeros(0, device=device), cu_seqlens, backend=backend)
    assert result.scores.tolist() == [0.0, 0.0, 0.0]
    assert result.lengths.tolist() == [0, 0, 0]
