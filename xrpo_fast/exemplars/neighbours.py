"""Nearest questions: exact top-k in blocks of bounded memory, and the table of them on disk.

Legend: P prompts, K neighbours kept per prompt, N = neighbours in all (<= P K).
"""

import os
import warnings
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import sparse

from xrpo_fast.exemplars.embed import Vectors

NUM_NEIGHBOURS = 64
BLOCK_BYTES = 256 * 2**20
# A similarity, its column and its row, at their widest.
_BYTES_PER_PAIR = 24
# Float rounding must neither order equal vectors nor decide at a bound such as exactly 0.5.
_DECIMALS = 6


Bounds = tuple[float, float | None]


@dataclass(kw_only=True, slots=True, frozen=True)
class NeighbourTable:
    """Neighbours of each query, nearest first; row p is offsets[p]:offsets[p + 1]."""

    offsets: np.ndarray
    """(P + 1,) int64."""
    indices: np.ndarray
    """(N,) int32, rows of the keys."""
    similarities: np.ndarray
    """(N,) float32, cosines."""

    def row(self, query: int) -> tuple[list[int], list[float]]:
        """Neighbours of one query and their cosines."""
        begin, end = self.offsets[query], self.offsets[query + 1]
        return self.indices[begin:end].tolist(), self.similarities[begin:end].tolist()


def nearest(
    queries: Vectors,
    keys: Vectors,
    *,
    query_groups: np.ndarray,
    key_groups: np.ndarray,
    num_neighbours: int = NUM_NEIGHBOURS,
    bounds: Bounds,
) -> NeighbourTable:
    """Exact nearest keys of each query with low <= cosine < high.

    Args:
        queries, keys: (P, D) and (Q, D), unit rows, both sparse or both dense, float32.
        query_groups, key_groups: (P,) and (Q,) int64; a pair of equal groups is one problem twice
            and is left out.
        bounds: (low, high), low > 0; high None = none.
    Returns:
        NeighbourTable, equal similarities in order of key.
    Notes:
        Peak memory beyond inputs and result is about BLOCK_BYTES.
    """
    num_queries = len(query_groups)
    block_rows = max(1, BLOCK_BYTES // (_BYTES_PER_PAIR * max(1, len(key_groups))))
    keys_t = _transpose(keys)
    pairs = _sparse_pairs if sparse.issparse(keys) else _dense_pairs
    counts, indices, similarities = [], [], []
    for begin in range(0, num_queries, block_rows):
        block = queries[begin : begin + block_rows]
        num_rows = min(block_rows, num_queries - begin)
        groups = query_groups[begin : begin + block_rows]
        rows, columns, values = pairs(block @ keys_t, bounds, groups, key_groups, num_neighbours)
        order = np.lexsort((columns, -values, rows))
        rows, columns, values = rows[order], columns[order], values[order]
        starts = np.searchsorted(rows, np.arange(num_rows))
        is_kept = np.arange(rows.size) - starts[rows] < num_neighbours
        counts.append(np.bincount(rows[is_kept], minlength=num_rows))
        indices.append(columns[is_kept].astype(np.int32))
        similarities.append(values[is_kept])
    return NeighbourTable(
        offsets=np.concatenate([[0], *counts]).cumsum().astype(np.int64),
        indices=np.concatenate([np.empty(0, np.int32), *indices]),
        similarities=np.concatenate([np.empty(0, np.float32), *similarities]),
    )


def largest_similarity(queries: Vectors, keys: Vectors) -> tuple[np.ndarray, np.ndarray]:
    """Largest cosine of each query to any key, (P,) float32, and that key, (P,) int64.

    No keys: zeros. In blocks, as nearest.
    """
    num_queries, num_keys = queries.shape[0], keys.shape[0]
    best, where = np.zeros(num_queries, np.float32), np.zeros(num_queries, np.int64)
    if num_keys == 0:
        return best, where
    block_rows = max(1, BLOCK_BYTES // (_BYTES_PER_PAIR * num_keys))
    keys_t = _transpose(keys)
    for begin in range(0, num_queries, block_rows):
        product = queries[begin : begin + block_rows] @ keys_t
        dense = product.toarray() if sparse.issparse(product) else product
        rows = slice(begin, begin + dense.shape[0])
        where[rows] = dense.argmax(axis=1)
        best[rows] = np.take_along_axis(dense, where[rows, None], axis=1)[:, 0]
    return best, where


def _transpose(keys: Vectors) -> Vectors:
    return keys.T.tocsr() if sparse.issparse(keys) else keys.T


_Pairs = tuple[np.ndarray, np.ndarray, np.ndarray]


def _sparse_pairs(
    product: Any,
    bounds: Bounds,
    query_groups: np.ndarray,
    key_groups: np.ndarray,
    _num_neighbours: int,
) -> _Pairs:
    """Rows, columns and cosines of a block's pairs that may stand in the table."""
    values = np.round(product.data, _DECIMALS)
    kept = np.flatnonzero(_is_within(values, bounds))
    rows = np.searchsorted(product.indptr, kept, side="right") - 1
    columns = product.indices[kept].astype(np.int64)
    is_other = query_groups[rows] != key_groups[columns]
    return rows[is_other], columns[is_other], values[kept][is_other]


def _dense_pairs(
    product: Any,
    bounds: Bounds,
    query_groups: np.ndarray,
    key_groups: np.ndarray,
    num_neighbours: int,
) -> _Pairs:
    """As _sparse_pairs, cut to the best num_neighbours of a row and their equals: most pairs of
    sentence embeddings are within the bounds, too many to sort."""
    low, high = bounds
    edge = 10.0**-_DECIMALS
    flat = product.reshape(-1)
    if high is not None:
        near_high = np.flatnonzero(flat >= np.float32(high - edge))
        flat[near_high[~_is_within(np.round(flat[near_high], _DECIMALS), bounds)]] = -np.inf
    product[_same(query_groups, key_groups)] = -np.inf
    floor = np.full((len(product), 1), low - edge, np.float32)
    if product.shape[1] > num_neighbours:
        best = torch.topk(torch.from_numpy(product), num_neighbours, dim=1).values
        floor = np.maximum(floor, best[:, -1:].numpy() - np.float32(edge))
    rows, columns = np.divmod(np.flatnonzero(product >= floor), product.shape[1])
    values = np.round(product[rows, columns], _DECIMALS)
    is_kept = _is_within(values, bounds)
    return rows[is_kept], columns[is_kept], values[is_kept]


def _same(query_groups: np.ndarray, key_groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of the pairs of equal groups."""
    order = np.argsort(key_groups, kind="stable")
    sorted_groups = key_groups[order]
    first = np.searchsorted(sorted_groups, query_groups, side="left")
    counts = np.searchsorted(sorted_groups, query_groups, side="right") - first
    rows = np.repeat(np.arange(len(query_groups)), counts)
    within = np.arange(len(rows)) - np.repeat(counts.cumsum() - counts, counts)
    return rows, order[first[rows] + within]


def _is_within(values: np.ndarray, bounds: Bounds) -> np.ndarray:
    low, high = bounds
    is_within = values >= np.float32(low)
    return is_within if high is None else is_within & (values < np.float32(high))


def save_arrays(path: Path, **arrays: np.ndarray) -> None:
    """Writes an .npz that is either whole or absent."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with part.open("wb") as file:
        np.savez(file, **arrays)  # pyright: ignore[reportArgumentType]
    os.replace(part, path)


def load_arrays(path: Path) -> dict[str, np.ndarray] | None:
    """Arrays of an .npz, or None where there is none; a damaged file warns and counts as none."""
    if not path.exists():
        return None
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        warnings.warn(f"{path}: damaged cache ({error}); it is computed anew", stacklevel=2)
        return None
