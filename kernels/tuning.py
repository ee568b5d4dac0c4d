"""Launch shapes of the Triton kernels: which tile, how many warps, when a row is split.

Legend: T rows (scored tokens), V vocabulary. Nothing here is timed or tuned at run time: a tile
follows from V and dtype only, so that a row's result cannot depend on how many rows come with it.
"""

import functools
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

VECTOR_BYTES = 16
"""Widest global access of sm_80 and sm_90; an aligned tile is read and written in these."""
ELEMENTS_PER_THREAD = 32
"""Of a tile: 64 bytes (16-bit) or 128 (32-bit) in flight per thread, one rescaling per 32 exps."""
TILES_PER_SEGMENT = 8
"""A segment ends in one reduction over lanes, about 6 % of the instructions of its 8 tiles."""
SMALL_VOCAB = 8192
"""Up to here one warp reads a row: a 4-warp tile of 4096 would be mostly mask."""

FLOAT_OPTIONS = {"enable_fp_fusion": False}
"""Stated, because Triton's default changes: the same bits from kernels that share a formula."""
MERGE_OPTIONS = {"num_warps": 1, **FLOAT_OPTIONS}

TOKENS_PER_TILE = 512
ROWS_PER_TILE = 8
"""Log-probs that a program adds up at a time: 16 KiB of 8 sequences in flight; more would spill."""
ROWS_PER_BLOCK = 128
"""Rows of a group whose statistics a program takes at a time; larger groups take several turns."""
BATCH_BLOCK = 1024
"""Rows of the batch behind one partial result of scale="batch"."""
TOKEN_OPTIONS = {"num_warps": 8, **FLOAT_OPTIONS}
STATS_OPTIONS = {"num_warps": 1, **FLOAT_OPTIONS}
"""Without tokens a group is a few rows: one warp reduces by shuffles, without a barrier."""


@dataclass(frozen=True)
class VocabTile:
    """A tile of one row: TILE_ROWS x (LANES x VEC) consecutive columns, VEC per thread each."""

    VEC: int
    TILE_ROWS: int
    LANES: int
    num_warps: int

    @property
    def segment_columns(self) -> int:
        return TILES_PER_SEGMENT * self.TILE_ROWS * self.LANES * self.VEC

    def constexprs(self) -> dict[str, int]:
        """Keyword arguments of a kernel launch."""
        return {
            "VEC": self.VEC,
            "TILE_ROWS": self.TILE_ROWS,
            "LANES": self.LANES,
            "SEGMENT_TILES": TILES_PER_SEGMENT,
        }

    def options(self) -> dict[str, int | bool]:
        """Compile options of a kernel launch."""
        return {"num_warps": self.num_warps, **FLOAT_OPTIONS}


def vocab_tile(vocab_size: int, dtype: torch.dtype, in_vectors: bool) -> VocabTile:
    """The tile for a vocabulary and a dtype; single columns per access unless `in_vectors`."""
    vec = VECTOR_BYTES // dtype.itemsize if in_vectors else 1
    num_warps = 1 if vocab_size <= SMALL_VOCAB else 4
    return VocabTile(vec, ELEMENTS_PER_THREAD // vec, 32 * num_warps, num_warps)


def _is_row_aligned(rows: Tensor) -> bool:
    stride_bytes = rows.stride(0) * rows.element_size()
    return rows.data_ptr() % VECTOR_BYTES == 0 and stride_bytes % VECTOR_BYTES == 0


def reads_vectors(rows: Tensor, columns: int) -> bool:
    """Whether 16-byte loads can cover `columns` columns of every row of a (T, V) tensor.

    Rows must be aligned, and the last vector lie in the row's memory, of which a view of padded
    rows may show less.
    """
    vec = VECTOR_BYTES // rows.element_size()
    columns = -(-columns // vec) * vec
    if columns <= rows.shape[1]:
        return _is_row_aligned(rows)
    end = rows.storage_offset() + (rows.shape[0] - 1) * rows.stride(0) + columns
    is_stored = end * rows.element_size() <= rows.untyped_storage().nbytes()
    return is_stored and columns <= rows.stride(0) and _is_row_aligned(rows)


def writes_vectors(rows: Tensor) -> bool:
    """Whether 16-byte stores can cover every row of a (T, V) tensor and nothing else."""
    return rows.shape[1] * rows.element_size() % VECTOR_BYTES == 0 and _is_row_aligned(rows)


def splits_rows(num_rows: int, num_segments: int, device: torch.device) -> bool:
    """Whether whole rows would leave multiprocessors idle: fewer than two rows for each."""
    return num_segments > 1 and num_rows < 2 * _num_multiprocessors(device)


@functools.lru_cache
def _num_multiprocessors(device: torch.device) -> int:
    if device.type == "cpu":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def device_of(tensor: Tensor) -> AbstractContextManager:
    """Makes the tensor's GPU the current one: Triton launches there, whatever the arguments."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
