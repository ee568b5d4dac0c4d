"""What planning costs, against NumPy, SciPy and a heap in Python.

    pytest benchmarks/bench_planner.py --benchmark-only        up to 1,000,000 prompts
    XRPO_BENCH_QUICK=1 pytest ...                              up to 4096 prompts

On a busy machine add --benchmark-timer=time.thread_time: processor seconds of this thread.
extra_info: ns_per_prompt of a round, ns_per_decision of greedy and streaming.

All providers start from the same counts and standard deviations. `numpy` is vectorised, with the
quantiles cached per df and argpartition for the remainder; `scipy` calls the quantile per prompt;
`heapq` is the greedy rule with cached quantiles, one heap.
"""

import functools
import heapq
import math
import os

import numpy as np
import pytest
from scipy import stats

from xrpo_fast.planner import RolloutPlanner, student_t_quantile

IS_QUICK = os.environ.get("XRPO_BENCH_QUICK") == "1"
SIZES = [256, 4096] if IS_QUICK else [256, 4096, 1_000_000]
BASE, MEAN, LAMBDA = 4, 8, 0.1
LARGEST_N = 200
NUM_GREEDY_PROMPTS, NUM_GREEDY = (256, 4096) if IS_QUICK else (4096, 65_536)

QUANTILE = np.concatenate([[np.nan], student_t_quantile(0.975, np.arange(1.0, LARGEST_N + 2))])


def rewards_of(kind, num_prompts):
    rng = np.random.default_rng(0)
    if kind == "real":
        return rng.normal(size=(num_prompts, BASE))
    return (rng.random((num_prompts, BASE)) < rng.random((num_prompts, 1))).astype(float)


@functools.cache
def ids_of(num_prompts):
    return [str(q) for q in range(num_prompts)]


def planner_after_base(planner, rewards):
    """The same planner again at the end of its base phase: its buffers are warm, as in a run."""
    num_prompts = len(rewards)
    planner.begin_step(ids_of(num_prompts), 0)
    groups = np.repeat(np.arange(num_prompts), BASE)
    if planner.allocation == "streaming":
        planner.next_prompts(BASE * num_prompts)
    else:
        planner.plan_round()
    planner.observe(groups, rewards.ravel())
    return planner


def numpy_priorities(n, s):
    reduction = QUANTILE[n - 1] * s / np.sqrt(n) - QUANTILE[n] * s / np.sqrt(n + 1)
    return reduction + LAMBDA * np.sqrt(np.log(1 + n.sum()) / n)


def numpy_round(n, s, budget):
    weights = numpy_priorities(n, s)
    exact = budget * weights / weights.sum()
    counts = np.floor(exact).astype(np.int64)
    rest = budget - counts.sum()
    counts[np.argpartition(counts - exact, rest)[:rest]] += 1
    return counts


def scipy_round(n, s, budget):
    drawn = n.sum()
    weights = np.empty(len(n))
    for q in range(len(n)):
        low, high = stats.t.ppf(0.975, n[q] - 1), stats.t.ppf(0.975, n[q])
        reduction = low * s[q] / math.sqrt(n[q]) - high * s[q] / math.sqrt(n[q] + 1)
        weights[q] = reduction + LAMBDA * math.sqrt(math.log(1 + drawn) / n[q])
    exact = budget * weights / weights.sum()
    counts = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind="stable")[: budget - counts.sum()]] += 1
    return counts


GAIN = (QUANTILE[:-1] / np.sqrt(np.arange(1, LARGEST_N + 2)))[1:]
GAIN = np.concatenate([[np.nan, np.nan], GAIN[:-1] - GAIN[1:]]).tolist()
"""t_{n-1} / sqrt(n) - t_n / sqrt(n+1), by n."""


def heapq_greedy(n, s, budget):
    """One heap; the T in a key is that of its last push, so the order is not quite exact."""
    drawn = int(n.sum())
    scale = LAMBDA * math.sqrt(math.log(1 + drawn))
    spreads, counts = s.tolist(), n.tolist()
    heap = [(-spreads[q] * GAIN[k] - scale / math.sqrt(k), q) for q, k in enumerate(counts)]
    heapq.heapify(heap)
    for _ in range(budget):
        q = heap[0][1]
        counts[q] += 1
        drawn += 1
        k = counts[q]
        bonus = LAMBDA * math.sqrt(math.log(1 + drawn) / k)
        heapq.heapreplace(heap, (-spreads[q] * GAIN[k] - bonus, q))
    return np.array(counts) - n


def exact_greedy(n, s, budget):
    """One heap per n, ordered by s; heads compared at the current T."""
    heaps = {}
    for q, (count, spread) in enumerate(zip(n.tolist(), s.tolist(), strict=True)):
        heaps.setdefault(count, []).append((-spread, q))
    for heap in heaps.values():
        heapq.heapify(heap)
    counts, drawn = np.zeros(len(n), int), int(n.sum())
    for _ in range(budget):
        scale = LAMBDA * math.sqrt(math.log(1 + drawn))
        best = max(heaps, key=lambda k: scale / math.sqrt(k) - heaps[k][0][0] * GAIN[k])
        entry = heapq.heappop(heaps[best])
        if not heaps[best]:
            del heaps[best]
        heapq.heappush(heaps.setdefault(best + 1, []), entry)
        counts[entry[1]] += 1
        drawn += 1
    return counts


def assert_same_plan(counts, truth, s):
    """Equal, but that prompts of equal statistics may swap places."""
    assert counts.sum() == truth.sum()
    for spread in np.unique(s):
        ours, theirs = counts[s == spread], truth[s == spread]
        np.testing.assert_allclose(np.sort(ours), np.sort(theirs), atol=1)


@pytest.mark.parametrize("provider", ["ours", "numpy", "scipy"])
@pytest.mark.parametrize("kind", ["binary", "real"])
@pytest.mark.parametrize("num_prompts", SIZES, ids=lambda n: f"P{n}")
def test_proportional_round(benchmark, num_prompts, kind, provider):
    if provider == "scipy" and (num_prompts > 4096 or kind == "real"):
        pytest.skip("per prompt: 4096 prompts of one kind say what a million cost")
    rewards = rewards_of(kind, num_prompts)
    n, s = np.full(num_prompts, BASE), rewards.std(axis=1, ddof=1)
    budget = (MEAN - BASE) * num_prompts
    planner = RolloutPlanner(
        num_prompts, total_rollouts=MEAN * num_prompts, base_rollouts=BASE, rounds=1
    )
    rounds = 3 if provider == "scipy" else 21
    if provider == "ours":
        counts = benchmark.pedantic(
            lambda planner: planner.plan_round(),
            setup=lambda: ((planner_after_base(planner, rewards),), {}),
            rounds=rounds,
            warmup_rounds=2,
        )
    else:
        run = numpy_round if provider == "numpy" else scipy_round
        counts = benchmark.pedantic(run, args=(n, s, budget), rounds=rounds, warmup_rounds=1)
    weights = numpy_priorities(n, s)
    assert counts.sum() == budget
    np.testing.assert_allclose(counts, budget * weights / weights.sum(), atol=1 + 1e-6)
    benchmark.extra_info.update(provider=provider, rewards=kind, num_prompts=num_prompts)
    if benchmark.stats:
        benchmark.extra_info["ns_per_prompt"] = benchmark.stats.stats.median / num_prompts * 1e9


@pytest.mark.parametrize("provider", ["ours", "heapq"])
def test_greedy_plan(benchmark, provider):
    rewards = rewards_of("binary", NUM_GREEDY_PROMPTS)
    n, s = np.full(NUM_GREEDY_PROMPTS, BASE), rewards.std(axis=1, ddof=1)
    planner = RolloutPlanner(
        NUM_GREEDY_PROMPTS,
        total_rollouts=BASE * NUM_GREEDY_PROMPTS + NUM_GREEDY,
        base_rollouts=BASE,
        rounds=1,
        allocation="greedy",
    )
    if provider == "ours":
        counts = benchmark.pedantic(
            lambda planner: planner.plan_round(),
            setup=lambda: ((planner_after_base(planner, rewards),), {}),
            rounds=21,
            warmup_rounds=2,
        )
    else:
        counts = benchmark.pedantic(heapq_greedy, args=(n, s, NUM_GREEDY), rounds=5)
    truth = heapq_greedy(n, s, NUM_GREEDY)
    for spread in np.unique(s):  # equal prompts may swap places
        np.testing.assert_allclose(
            np.sort(counts[s == spread]), np.sort(truth[s == spread]), atol=1
        )
    report_decisions(benchmark, provider)


def test_streaming_decisions(benchmark):
    """A decision for each reward, one call each from Python: 256 rollouts in flight."""
    rng = np.random.default_rng(1)
    rewards = rewards_of("binary", NUM_GREEDY_PROMPTS)
    rates = rewards.mean(axis=1)
    luck = rng.random(NUM_GREEDY).tolist()
    planner = new_streaming_planner()

    def setup():
        planner_after_base(planner, rewards)
        return (planner.next_prompts(256),), {}

    def decide(running):
        for value in luck[: NUM_GREEDY - 256]:
            prompt = running.pop()
            planner.observe_one(prompt, float(value < rates[prompt]))
            running.insert(0, planner.next_prompt())
        return running

    running = benchmark.pedantic(decide, setup=setup, rounds=7, warmup_rounds=1)
    assert len(running) == 256
    assert planner.is_done
    assert planner.counts.sum() + 256 == BASE * NUM_GREEDY_PROMPTS + NUM_GREEDY
    report_decisions(benchmark, "ours")


def test_streaming_decisions_in_one_call(benchmark):
    """The same decisions without results between them: what a decision costs inside C++."""
    rewards = rewards_of("binary", NUM_GREEDY_PROMPTS)
    planner = new_streaming_planner()
    prompts = benchmark.pedantic(
        lambda: planner.next_prompts(NUM_GREEDY),
        setup=lambda: (planner_after_base(planner, rewards), None)[1],
        rounds=21,
        warmup_rounds=2,
    )
    n, s = np.full(NUM_GREEDY_PROMPTS, BASE), rewards.std(axis=1, ddof=1)
    counts, truth = np.bincount(prompts, minlength=len(n)), heapq_greedy(n, s, NUM_GREEDY)
    for spread in np.unique(s):
        np.testing.assert_allclose(
            np.sort(counts[s == spread]), np.sort(truth[s == spread]), atol=1
        )
    report_decisions(benchmark, "ours")


def new_streaming_planner():
    return RolloutPlanner(
        NUM_GREEDY_PROMPTS,
        total_rollouts=BASE * NUM_GREEDY_PROMPTS + NUM_GREEDY,
        base_rollouts=BASE,
        allocation="streaming",
    )


def report_decisions(benchmark, provider):
    benchmark.extra_info.update(provider=provider, num_prompts=NUM_GREEDY_PROMPTS)
    if benchmark.stats:
        benchmark.extra_info["ns_per_decision"] = benchmark.stats.stats.median / NUM_GREEDY * 1e9


@pytest.mark.parametrize("provider", ["ours", "scipy"])
def test_quantiles(benchmark, provider):
    df, p = np.arange(1.0, 1001.0), 0.975
    run = student_t_quantile if provider == "ours" else stats.t.ppf
    values = benchmark.pedantic(run, args=(p, df), rounds=21, warmup_rounds=2)
    np.testing.assert_allclose(values, stats.t.ppf(p, df), rtol=1e-12)
