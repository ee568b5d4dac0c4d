"""CPU: advantages of ragged groups against a loop over rows and torch (GPU: bench_gpu.py).

    pytest benchmarks/bench_advantages.py --benchmark-only

Groups of 2 to 14 rollouts. Ours takes scores and gives XRPO's advantage with its statistics; the
others give the plain advantage only. Bytes: 24 per row. `error` is the largest against float64.
"""

import os

import pytest
import torch
from torch import Tensor

from xrpo_fast.ops import group_advantages, sequence_logprobs, xrpo_advantages

IS_QUICK = os.environ.get("XRPO_BENCH_QUICK") == "1"
SIZES = [1024] if IS_QUICK else [1024, 65_536]
EPS = 1e-6


def loop_over_rows(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """As verl's compute_grpo_outcome_advantage works: lists by id, then row by row."""
    by_group: dict[int, list[Tensor]] = {}
    for i in range(rewards.shape[0]):
        by_group.setdefault(int(group_ids[i]), []).append(rewards[i])
    stats = {g: (torch.stack(r).mean(), torch.stack(r).std()) for g, r in by_group.items()}
    out = torch.empty_like(rewards)
    for i in range(rewards.shape[0]):
        mean, std = stats[int(group_ids[i])]
        out[i] = (rewards[i] - mean) / (std + EPS)
    return out


def index_add(rewards: Tensor, group_ids: Tensor, num_groups: int) -> Tensor:
    def total(x: Tensor) -> Tensor:
        return torch.zeros(num_groups).index_add_(0, group_ids, x)

    count = total(torch.ones_like(rewards))
    centered = rewards - (total(rewards) / count)[group_ids]
    std = (total(centered * centered) / (count - 1)).sqrt()
    return centered / (std[group_ids] + EPS)


class Batch:
    def __init__(self, num_seqs: int) -> None:
        generator = torch.Generator().manual_seed(0)
        sizes = torch.randint(2, 15, (num_seqs // 2,), generator=generator)
        ends = sizes.cumsum(0)
        ends = torch.cat([ends[ends < num_seqs - 1], torch.tensor([num_seqs])])
        self.cu_groups = torch.cat([torch.zeros(1, dtype=torch.int64), ends])
        self.num_groups = ends.shape[0]
        self.group_ids = torch.arange(self.num_groups).repeat_interleave(self.cu_groups.diff())
        self.rewards = (torch.rand(num_seqs, generator=generator) < 0.4).float()
        self.scores = torch.randn(num_seqs, generator=generator)
        lengths = torch.randint(1, 64, (num_seqs,), generator=generator)
        self.cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        self.tokens = -torch.rand(int(lengths.sum()), generator=generator)
        truth = group_advantages(self.rewards.double(), cu_groups=self.cu_groups, backend="torch")
        self.exact = truth.advantages


@pytest.fixture(params=SIZES, ids=lambda n: f"S{n}", scope="module")
def batch(request: pytest.FixtureRequest) -> Batch:
    return Batch(request.param)


PROVIDERS = ["ours", "ours, group_ids", "ours, from tokens", "loop over rows", "index_add"]


@pytest.mark.parametrize("provider", PROVIDERS)
def test_advantages(batch: Batch, provider, measure):
    runs = {
        "ours": lambda: xrpo_advantages(
            batch.rewards, scores=batch.scores, cu_groups=batch.cu_groups
        ),
        "ours, group_ids": lambda: xrpo_advantages(
            batch.rewards, scores=batch.scores, group_ids=batch.group_ids
        ),
        "ours, from tokens": lambda: xrpo_advantages(
            batch.rewards,
            token_logprobs=batch.tokens,
            cu_seqlens=batch.cu_seqlens,
            cu_groups=batch.cu_groups,
        ),
        "loop over rows": lambda: loop_over_rows(batch.rewards, batch.group_ids),
        "index_add": lambda: index_add(batch.rewards, batch.group_ids, batch.num_groups),
    }
    run = runs[provider]
    result = run()
    base = result.base if provider.startswith("ours") else result
    error = (base.double() - batch.exact).abs().max().item()
    assert error < 1e-4
    num_seqs = batch.rewards.shape[0]
    is_slow = provider == "loop over rows"
    measure(
        run,
        f"advantages {num_seqs} rows",
        provider,
        24 * num_seqs,
        error,
        rounds=3 if is_slow else 30,
        calls=1 if is_slow else 10,
    )


@pytest.mark.parametrize("provider", ["ours", "segment_reduce"])
def test_sequence_scores(batch: Batch, provider, measure):
    runs = {
        "ours": lambda: sequence_logprobs(batch.tokens, batch.cu_seqlens).scores,
        "segment_reduce": lambda: torch.segment_reduce(
            batch.tokens, "mean", lengths=batch.cu_seqlens.diff()
        ),
    }
    exact = sequence_logprobs(batch.tokens.double(), batch.cu_seqlens, backend="torch").scores
    error = (runs[provider]().double() - exact).abs().max().item()
    assert error < 1e-5
    num_seqs = batch.rewards.shape[0]
    measure(
        runs[provider],
        f"scores of {num_seqs} sequences",
        provider,
        batch.tokens.nbytes + 12 * num_seqs,
        error,
        rounds=30,
        calls=10,
    )
