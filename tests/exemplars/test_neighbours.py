"""Blocked top-k against a brute-force search in float64."""

import numpy as np
import pytest
from scipy import sparse

from xrpo_fast.exemplars import neighbours
from xrpo_fast.exemplars.neighbours import largest_similarity, nearest


def unit_rows(rng, num_rows, width, density=1.0):
    rows = rng.random((num_rows, width)).astype(np.float32)
    rows *= rng.random((num_rows, width)) < density
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.divide(rows, norms, out=np.zeros_like(rows), where=norms > 0)


def brute_force(queries, keys, query_groups, key_groups, num_neighbours, bounds):
    """Neighbours of each query as lists of (key, cosine), straight from the definition."""
    low, high = bounds
    cosines = np.round(queries.astype(np.float64) @ keys.T.astype(np.float64), 6)
    result = []
    for query, row in enumerate(cosines):
        suitable = [
            (key, float(value))
            for key, value in enumerate(row)
            if value >= low
            and (high is None or value < high)
            and query_groups[query] != key_groups[key]
        ]
        result.append(sorted(suitable, key=lambda pair: (-pair[1], pair[0]))[:num_neighbours])
    return result


@pytest.mark.parametrize("form", ["sparse", "dense"])
@pytest.mark.parametrize("bounds", [(0.5, 0.95), (0.3, None)], ids=["banded", "open"])
@pytest.mark.parametrize(
    ("num_queries", "num_keys", "num_neighbours"),
    [(1, 1, 1), (53, 53, 64), (40, 97, 5), (97, 3, 2), (5, 0, 3), (0, 5, 3)],
    ids=lambda value: str(value),
)
def test_equals_brute_force(form, bounds, num_queries, num_keys, num_neighbours, monkeypatch):
    # Seven rows a block: block edges fall inside the queries.
    monkeypatch.setattr(neighbours, "BLOCK_BYTES", 24 * 7 * max(1, num_keys))
    rng = np.random.default_rng(num_queries * 1000 + num_keys)
    queries = unit_rows(rng, num_queries, 12, density=0.6)
    keys = unit_rows(rng, num_keys, 12, density=0.6)
    query_groups, key_groups = rng.integers(0, 20, num_queries), rng.integers(0, 20, num_keys)
    expected = brute_force(queries, keys, query_groups, key_groups, num_neighbours, bounds)
    convert = sparse.csr_matrix if form == "sparse" else np.asarray
    table = nearest(
        convert(queries),
        convert(keys),
        query_groups=query_groups,
        key_groups=key_groups,
        num_neighbours=num_neighbours,
        bounds=bounds,
    )
    assert table.offsets[-1] == len(table.indices) == len(table.similarities)
    for query, pairs in enumerate(expected):
        indices, similarities = table.row(query)
        assert indices == [key for key, _ in pairs]
        # A cosine on a rounding edge moves by one unit of the sixth decimal.
        assert similarities == pytest.approx([value for _, value in pairs], abs=1.1e-6)


@pytest.mark.parametrize("convert", [sparse.csr_matrix, np.asarray], ids=["sparse", "dense"])
def test_equal_similarities_in_order_of_key(convert):
    vectors = convert(np.ones((9, 1), np.float32))
    groups = np.arange(9)
    table = nearest(
        vectors,
        vectors,
        query_groups=groups,
        key_groups=groups,
        num_neighbours=3,
        bounds=(0.5, None),
    )
    assert [table.row(query)[0] for query in (0, 1, 8)] == [[1, 2, 3], [0, 2, 3], [0, 1, 2]]


@pytest.mark.parametrize("convert", [sparse.csr_matrix, np.asarray], ids=["sparse", "dense"])
def test_largest_similarity(convert):
    rng = np.random.default_rng(5)
    queries, keys = unit_rows(rng, 31, 8), unit_rows(rng, 6, 8)
    best, where = largest_similarity(convert(queries), convert(keys))
    cosines = queries.astype(np.float64) @ keys.T
    np.testing.assert_allclose(best, cosines.max(axis=1), atol=1e-6)
    np.testing.assert_array_equal(where, cosines.argmax(axis=1))
    none, _ = largest_similarity(convert(queries), convert(keys[:0]))
    assert not none.any()
