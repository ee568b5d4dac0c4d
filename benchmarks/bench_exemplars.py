"""What exemplars cost: retrieval per prompt, admission, the table of neighbours once per data set.

    pytest benchmarks/bench_exemplars.py --benchmark-only      100,000 prompts, 50,000 entries
    XRPO_BENCH_QUICK=1 pytest ...                              5,000 prompts, 2,500 entries

On a busy machine add --benchmark-timer=time.process_time: processor seconds of all threads.
extra_info: microseconds per prompt, peak memory of the process, fit and texts included, in MiB.
"""

import os
import resource

import numpy as np
import pytest

from xrpo_fast.exemplars import ExemplarStore, Success
from xrpo_fast.exemplars.embed import make_embedder
from xrpo_fast.exemplars.neighbours import nearest
from xrpo_fast.types import Prompt

NUM_WORDS = 30_000
PROMPTS_PER_TOPIC = 20
WORDS_PER_PROMPT = 40

IS_QUICK = os.environ.get("XRPO_BENCH_QUICK") == "1"

sizes = pytest.mark.parametrize(
    "num_prompts", [5_000] if IS_QUICK else [100_000], ids=lambda n: f"P{n}", indirect=True
)


@pytest.fixture(scope="module")
def num_prompts(request):
    return request.param


@pytest.fixture(scope="module")
def prompts(num_prompts):
    """Problems of half topic words, half own words, drawn by Zipf's law."""
    rng = np.random.default_rng(0)
    frequency = 1 / np.arange(1, NUM_WORDS + 1) ** 1.05
    edges = np.cumsum(frequency / frequency.sum())
    vocabulary = np.array([f"word{i}" for i in range(NUM_WORDS)])

    def draw(*shape):
        return vocabulary[np.minimum(np.searchsorted(edges, rng.random(shape)), NUM_WORDS - 1)]

    half = WORDS_PER_PROMPT // 2
    topics = draw(num_prompts // PROMPTS_PER_TOPIC, half)
    own = draw(num_prompts, half)
    texts = [" ".join([*topics[i // PROMPTS_PER_TOPIC], *own[i]]) for i in range(num_prompts)]
    return [
        Prompt(id=str(i), index=i, question=text, token_ids=(1,), answer="")
        for i, text in enumerate(texts)
    ]


@sizes
def test_neighbour_table(benchmark, prompts):
    texts = [prompt.question for prompt in prompts]
    embedder = make_embedder("tfidf")
    embedder.fit(texts)
    vectors, groups = embedder.embed(texts), np.arange(len(texts))

    def run():
        return nearest(vectors, vectors, query_groups=groups, key_groups=groups, bounds=(0.5, 0.95))

    table = benchmark.pedantic(run, rounds=1)
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    for query in range(0, len(texts), len(texts) // 50):
        indices, similarities = table.row(query)
        cosines = vectors @ vectors[query]
        assert similarities == pytest.approx(cosines[indices].tolist(), abs=2e-6)
        cosines[query] = 0
        allowed = np.sort(cosines[(cosines >= 0.5) & (cosines < 0.95)])[::-1][:64]
        assert similarities == pytest.approx(allowed.tolist(), abs=2e-6)
    benchmark.extra_info["neighbours_per_prompt"] = len(table.indices) / len(texts)
    benchmark.extra_info["process_peak_mib"] = peak_mib


@sizes
def test_embed(benchmark, prompts):
    texts = [prompt.question for prompt in prompts]

    def run():
        embedder = make_embedder("tfidf")
        embedder.fit(texts)
        return embedder.embed(texts)

    vectors = benchmark.pedantic(run, rounds=1)
    assert vectors.shape == (len(texts), 128)


@pytest.fixture(scope="module")
def store(prompts):
    """Half of the problems have a success of step 1."""
    store = ExemplarStore(prompts, [])
    assert store.admit(successes(prompts), step=1) == len(prompts) // 2
    return store


def successes(prompts):
    return [
        Success(prompt_index=i, response="x" * 400, num_tokens=100)
        for i in range(0, len(prompts), 2)
    ]


@sizes
def test_retrieve_from_table(benchmark, store, prompts):
    chosen = np.random.default_rng(1).permutation(len(prompts))[:5000].tolist()
    found = [store.retrieve(i, 2) for i in chosen]
    assert np.mean([len(each) for each in found]) > 1.9
    assert all(int(e.prompt_id) != i for i, each in zip(chosen, found, strict=True) for e in each)

    def run():
        for i in chosen:
            store.retrieve(i, 2)

    benchmark(run)
    benchmark.extra_info["us_per_prompt"] = benchmark.stats["median"] / len(chosen) * 1e6


@sizes
def test_retrieve_outside_table(benchmark, store, prompts):
    chosen = [
        Prompt(id=f"other {p.id}", index=0, question=p.question, token_ids=(1,), answer="")
        for p in prompts[:256]
    ]
    found = store.retrieve_outside(chosen, 2)
    for i, each in enumerate(found):
        from_table = [e.similarity for e in store.retrieve(i, 2)]
        assert [e.similarity for e in each] == pytest.approx(from_table, abs=1e-5)
    benchmark.pedantic(store.retrieve_outside, args=(chosen, 2), rounds=5, warmup_rounds=1)
    benchmark.extra_info["us_per_prompt"] = benchmark.stats["median"] / len(chosen) * 1e6


@sizes
def test_admit_a_step(benchmark, store, prompts):
    """256 successes of problems that have an entry, as a late step brings."""
    steps = iter(range(2, 200))

    def setup():
        return (successes(prompts[:512]), next(steps)), {}

    benchmark.pedantic(store.admit, setup=setup, rounds=20, warmup_rounds=2)
    benchmark.extra_info["us_per_success"] = benchmark.stats["median"] / 256 * 1e6
