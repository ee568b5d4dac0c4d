"""Log-prob and entropy of one token per row of logits, forward and backward, each in one pass.

Legend: T rows (scored tokens), V columns of which the first vocab_size count; y the row's label.

    z_v      = (x_v - max_v x_v) / temperature
    logprob  = z_y - log sum_v exp(z_v)
    entropy  = log sum_v exp(z_v) - sum_v p_v z_v                  p_v = exp(z_v) / sum_u exp(z_u)
    dx_v     = (dlogprob (1[v = y] - p_v) + dentropy p_v (sum_u p_u z_u - z_v)) / temperature

A program reads one row, segment by segment, 8 tiles each. Where rows are few it reads one segment
and a second launch merges the segments in the same order: the same bits either way. The label's
column joins last, in float64, so that 1 - p_y, which the backward needs, is exact even where p_y
rounds to 1. Kept for the backward are the row's maximum and sum (12 bytes), not their logarithm: a
rounded log-sum-exp costs confident tokens their gradient. The backward recomputes exp from the
logits, tile by tile, and may write over them. A row that is masked, has a label outside the
vocabulary, or has no upstream gradient is not read.

Bytes for logits of b bytes: forward T V b, backward 2 T V b, and a few per row.
"""

# Kernels are launched, not called, and their constants arrive as plain numbers.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from xrpo_fast.kernels.primitives import (
    MINUS_INF,
    add_tile,
    empty_stats,
    exp2_scale,
    load_tail,
    merge,
    reduce_lanes,
    row_start,
    row_temperature,
    tile_offsets,
    usable_label,
)
from xrpo_fast.kernels.tuning import (
    MERGE_OPTIONS,
    device_of,
    reads_vectors,
    splits_rows,
    vocab_tile,
    writes_vectors,
)

# Never specialised: one kernel whatever the lengths, strides and masks. VEC says what is aligned.
_SCALARS = ["logits_stride", "out_stride", "vocab_size", "num_columns", "num_segments"]
_SCALARS += ["temperature", "temperature_stride", "is_tensor", "has_mask"]
_POINTERS = ["labels_ptr", "temperature_ptr", "mask_ptr", "logprobs_ptr", "entropy_ptr"]
_POINTERS += ["row_max_ptr", "row_sum_ptr", "dlogprobs_ptr", "dentropy_ptr", "partials_ptr"]
_POINTERS += ["logits_ptr", "dlogits_ptr"]

# The parameter lists of the kernels are several to a line.
# fmt: off


@triton.jit
def _segment_stats(
    row_ptr, segment, vocab_size, label, scale,
    WITH_ENTROPY: tl.constexpr, VEC: tl.constexpr, TILE_ROWS: tl.constexpr,
    LANES: tl.constexpr, SEGMENT_TILES: tl.constexpr,
):
    """(max, sum, dev) of the columns of one segment, without the label's."""
    tile: tl.constexpr = TILE_ROWS * LANES * VEC
    start = segment * (tile * SEGMENT_TILES)
    stop = tl.minimum(start + tile * SEGMENT_TILES, vocab_size)
    full_stop = start + (stop - start) // tile * tile
    offs = tile_offsets(TILE_ROWS, LANES, VEC)
    lane_max = tl.full([LANES], MINUS_INF, tl.float32)
    lane_sum = tl.zeros([LANES], tl.float32)
    lane_dev = tl.zeros([LANES], tl.float32)
    for base in range(start, full_stop, tile):
        x = tl.load(row_ptr + (base + offs)).to(tl.float32)
        if (label >= base) & (label < base + tile):
            x = tl.where(base + offs == label, MINUS_INF, x)
        lane_max, lane_sum, lane_dev = add_tile(
            x, lane_max, lane_sum, lane_dev, scale, LANES, VEC, WITH_ENTROPY
        )
    # 8 columns per thread at a time: the masks of a whole tile would spill registers.
    tail_rows: tl.constexpr = 8 // VEC
    for base in range(full_stop, stop, tail_rows * LANES * VEC):
        offs_v = base + tile_offsets(tail_rows, LANES, VEC)
        x = load_tail(row_ptr, offs_v, stop, VEC)
        x = tl.where(offs_v == label, MINUS_INF, x)
        lane_max, lane_sum, lane_dev = add_tile(
            x, lane_max, lane_sum, lane_dev, scale, LANES, VEC, WITH_ENTROPY
        )
    return reduce_lanes(lane_max, lane_sum, lane_dev, scale, WITH_ENTROPY)


@triton.jit
def _finish_row(
    row, row_max, row_sum, row_dev, label_logit, temperature, scale,
    logprobs_ptr, entropy_ptr, row_max_ptr, row_sum_ptr, WITH_ENTROPY: tl.constexpr,
):
    """Lets the label's column join and writes the results of a row."""
    label_sum = tl.where(label_logit == MINUS_INF, 0.0, 1.0).to(tl.float64)
    row_max, row_sum, row_dev = merge(
        row_max, row_sum, row_dev, label_logit, label_sum, label_sum * 0.0, scale
    )
    log_sum = tl.log(row_sum)
    label_z = (label_logit.to(tl.float64) - row_max.to(tl.float64)) / temperature.to(tl.float64)
    tl.store(logprobs_ptr + row, (label_z - log_sum).to(tl.float32))
    if WITH_ENTROPY:
        entropy = log_sum - row_dev / row_sum / temperature.to(tl.float64)
        tl.store(entropy_ptr + row, entropy.to(tl.float32))
    tl.store(row_max_ptr + row, row_max)
    tl.store(row_sum_ptr + row, row_sum)


@triton.jit
def _skip_row(
    row, scored, logprobs_ptr, entropy_ptr, row_max_ptr, row_sum_ptr, WITH_ENTROPY: tl.constexpr
):
    """Writes the results of a row that is masked (0) or has no usable label (NaN)."""
    value = tl.where(scored, float("nan"), 0.0)
    tl.store(logprobs_ptr + row, value)
    if WITH_ENTROPY:
        tl.store(entropy_ptr + row, value)
    tl.store(row_max_ptr + row, 0.0)
    tl.store(row_sum_ptr + row, 1.0)


@triton.jit(do_not_specialize=_SCALARS, do_not_specialize_on_alignment=_POINTERS)
def _token_logprobs_fwd_kernel(
    logits_ptr, labels_ptr, temperature_ptr, mask_ptr, partials_ptr, logprobs_ptr, entropy_ptr,
    row_max_ptr, row_sum_ptr, logits_stride, vocab_size, num_segments, temperature,
    temperature_stride, is_tensor, has_mask,
    SPLIT: tl.constexpr, WITH_ENTROPY: tl.constexpr, VEC: tl.constexpr,
    TILE_ROWS: tl.constexpr, LANES: tl.constexpr, SEGMENT_TILES: tl.constexpr,
):
    """A program per row; SPLIT: per segment of a row, results in partials (T, num_segments, 3)."""
    pid = tl.program_id(0)
    row = pid // num_segments if SPLIT else pid
    scored, label = usable_label(labels_ptr, mask_ptr, row, has_mask, vocab_size)
    if label >= 0:
        value = row_temperature(temperature_ptr, temperature, temperature_stride, is_tensor, row)
        scale = exp2_scale(value)
        row_ptr = row_start(logits_ptr, row, logits_stride, VEC)
        if SPLIT:
            row_max, row_sum, row_dev = _segment_stats(
                row_ptr, pid % num_segments, vocab_size, label, scale, WITH_ENTROPY, VEC,
                TILE_ROWS, LANES, SEGMENT_TILES,
            )
            tl.store(partials_ptr + pid * 3, row_max.to(tl.float64))
            tl.store(partials_ptr + pid * 3 + 1, row_sum)
            tl.store(partials_ptr + pid * 3 + 2, row_dev)
        else:
            label_logit = tl.load(row_ptr + label).to(tl.float32)
            row_max, row_sum, row_dev = empty_stats()
            for segment in range(num_segments):
                next_max, next_sum, next_dev = _segment_stats(
                    row_ptr, segment, vocab_size, label, scale, WITH_ENTROPY, VEC,
                    TILE_ROWS, LANES, SEGMENT_TILES,
                )
                row_max, row_sum, row_dev = merge(
                    row_max, row_sum, row_dev, next_max, next_sum, next_dev, scale
                )
            _finish_row(
                row, row_max, row_sum, row_dev, label_logit, value, scale, logprobs_ptr,
                entropy_ptr, row_max_ptr, row_sum_ptr, WITH_ENTROPY,
            )
    elif not SPLIT:
        _skip_row(row, scored, logprobs_ptr, entropy_ptr, row_max_ptr, row_sum_ptr, WITH_ENTROPY)


@triton.jit(do_not_specialize=_SCALARS, do_not_specialize_on_alignment=_POINTERS)
def _token_logprobs_merge_kernel(
    logits_ptr, labels_ptr, temperature_ptr, mask_ptr, partials_ptr, logprobs_ptr, entropy_ptr,
    row_max_ptr, row_sum_ptr, logits_stride, vocab_size, num_segments, temperature,
    temperature_stride, is_tensor, has_mask,
    WITH_ENTROPY: tl.constexpr,
):
    """A program per row: merges its segments in the order of the kernel that reads whole rows."""
    row = tl.program_id(0)
    scored, label = usable_label(labels_ptr, mask_ptr, row, has_mask, vocab_size)
    if label >= 0:
        value = row_temperature(temperature_ptr, temperature, temperature_stride, is_tensor, row)
        scale = exp2_scale(value)
        label_logit = tl.load(logits_ptr + row.to(tl.int64) * logits_stride + label).to(tl.float32)
        row_max, row_sum, row_dev = empty_stats()
        for segment in range(num_segments):
            partial_ptr = partials_ptr + (row * num_segments + segment) * 3
            row_max, row_sum, row_dev = merge(
                row_max, row_sum, row_dev, tl.load(partial_ptr).to(tl.float32),
                tl.load(partial_ptr + 1), tl.load(partial_ptr + 2), scale,
            )
        _finish_row(
            row, row_max, row_sum, row_dev, label_logit, value, scale, logprobs_ptr, entropy_ptr,
            row_max_ptr, row_sum_ptr, WITH_ENTROPY,
        )
    else:
        _skip_row(row, scored, logprobs_ptr, entropy_ptr, row_max_ptr, row_sum_ptr, WITH_ENTROPY)


@triton.jit
def _tile_gradient(
    x, row_max, scale, inv_temperature, gain, slope, mean_z, HAS_DENTROPY: tl.constexpr
):
    """float32 dlogits of a tile x as if no column were the label's."""
    diff = x - row_max
    exp = tl.exp2(diff * scale)
    dx = exp * -gain
    if HAS_DENTROPY:
        # exp is 0 where diff is -inf: select, for their product is NaN.
        dx += tl.where(exp == 0.0, 0.0, exp * (slope * (mean_z - diff * inv_temperature)))
    return dx


@triton.jit
def _segment_gradient(
    row_ptr, out_row_ptr, start, stop, row_max, scale, inv_temperature, gain, slope, mean_z,
    vocab_size, columns, HAS_DENTROPY: tl.constexpr, VEC: tl.constexpr, TILE_ROWS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Writes dlogits of columns start..stop-1; each is read, then written, by one thread."""
    tile: tl.constexpr = TILE_ROWS * LANES * VEC
    offs = tile_offsets(TILE_ROWS, LANES, VEC)
    full_stop = start + tl.maximum(tl.minimum(stop, vocab_size) - start, 0) // tile * tile
    for base in range(start, full_stop, tile):
        x = tl.load(row_ptr + (base + offs)).to(tl.float32)
        dx = _tile_gradient(x, row_max, scale, inv_temperature, gain, slope, mean_z, HAS_DENTROPY)
        tl.store(out_row_ptr + (base + offs), dx.to(out_row_ptr.dtype.element_ty))
    tail_rows: tl.constexpr = 8 // VEC
    for base in range(full_stop, stop, tail_rows * LANES * VEC):
        offs_v = base + tile_offsets(tail_rows, LANES, VEC)
        x = load_tail(row_ptr, offs_v, vocab_size, VEC)
        dx = _tile_gradient(x, row_max, scale, inv_temperature, gain, slope, mean_z, HAS_DENTROPY)
        dx = tl.where(offs_v < vocab_size, dx, 0.0).to(out_row_ptr.dtype.element_ty)
        tl.store(out_row_ptr + offs_v, dx, mask=offs_v < columns)


@triton.jit(do_not_specialize=_SCALARS, do_not_specialize_on_alignment=_POINTERS)
def _token_logprobs_bwd_kernel(
    dlogprobs_ptr, dentropy_ptr, logits_ptr, labels_ptr, temperature_ptr, mask_ptr, row_max_ptr,
    row_sum_ptr, entropy_ptr, dlogits_ptr, logits_stride, out_stride, vocab_size, num_columns,
    num_segments, temperature, temperature_stride, is_tensor, has_mask,
    HAS_DENTROPY: tl.constexpr, VEC: tl.constexpr, TILE_ROWS: tl.constexpr,
    LANES: tl.constexpr, SEGMENT_TILES: tl.constexpr,
):
    """A program per segment of a row."""
    row = tl.program_id(0) // num_segments
    tile: tl.constexpr = TILE_ROWS * LANES * VEC
    # A multiple of VEC anyway; said here so that masks of a tail are by vector.
    columns = num_columns // VEC * VEC
    start = tl.program_id(0) % num_segments * (tile * SEGMENT_TILES)
    stop = tl.minimum(start + tile * SEGMENT_TILES, columns)
    out_row_ptr = row_start(dlogits_ptr, row, out_stride, VEC)
    _, label = usable_label(labels_ptr, mask_ptr, row, has_mask, vocab_size)
    dlogprob = tl.load(dlogprobs_ptr + row).to(tl.float64)
    dentropy = dlogprob * 0.0
    if HAS_DENTROPY:
        dentropy = tl.load(dentropy_ptr + row).to(tl.float64)
    if (label >= 0) & ((dlogprob != 0.0) | (dentropy != 0.0)):
        value = row_temperature(temperature_ptr, temperature, temperature_stride, is_tensor, row)
        scale = exp2_scale(value)
        inv_temperature = 1.0 / value
        row_max = tl.load(row_max_ptr + row)
        row_sum = tl.load(row_sum_ptr + row)
        mean_z = 0.0
        if HAS_DENTROPY:
            mean_z = (tl.log(row_sum) - tl.load(entropy_ptr + row).to(tl.float64)).to(tl.float32)
        per_exp = 1.0 / (row_sum * value.to(tl.float64))
        gain = dlogprob * per_exp
        slope = (dentropy * per_exp).to(tl.float32)
        row_ptr = row_start(logits_ptr, row, logits_stride, VEC)
        owns_label = (label >= start) & (label < stop)
        label_dx = 0.0
        if owns_label:
            label_logit = tl.load(row_ptr + label).to(tl.float32)
            label_exp = tl.exp2((label_logit - row_max) * scale)
            # 1 - p_y = (sum - exp_y) / sum, in float64: exact where p_y rounds to 1.
            label_dx = (gain * (row_sum - label_exp.to(tl.float64))).to(tl.float32)
            label_dx += _tile_gradient(
                label_logit, row_max, scale, inv_temperature, 0.0, slope, mean_z, HAS_DENTROPY
            )
            # dlogits may be logits: all warps have read this column before one writes it.
            tl.debug_barrier()
        _segment_gradient(
            row_ptr, out_row_ptr, start, stop, row_max, scale, inv_temperature, gain.to(tl.float32),
            slope, mean_z, vocab_size, columns, HAS_DENTROPY, VEC, TILE_ROWS, LANES,
        )
        if owns_label:
            tl.debug_barrier()
            tl.store(out_row_ptr + label, label_dx.to(dlogits_ptr.dtype.element_ty))
    else:
        zero = tl.zeros([TILE_ROWS, LANES * VEC], dlogits_ptr.dtype.element_ty)
        offs = tile_offsets(TILE_ROWS, LANES, VEC)
        for base in range(start, stop, tile):
            tl.store(out_row_ptr + base + offs, zero, mask=base + offs < columns)


# fmt: on


def _row_arguments(
    temperature: float | Tensor, mask: Tensor | None, stand_in: Tensor
) -> tuple[tuple[Tensor, Tensor], tuple[float, int, int, int]]:
    """(temperature_ptr, mask_ptr), (temperature, temperature_stride, is_tensor, has_mask).

    `stand_in` (float32) takes the place of what is absent, never read: one signature, one kernel.
    """
    mask_bytes = (stand_in if mask is None else mask).view(torch.uint8)
    has_mask = int(mask is not None)
    if isinstance(temperature, Tensor):
        return (temperature, mask_bytes), (1.0, int(temperature.numel() > 1), 1, has_mask)
    return (stand_in, mask_bytes), (float(temperature), 0, 0, has_mask)


def token_logprobs_fwd(
    logits: Tensor,
    labels: Tensor,
    temperature: float | Tensor,
    mask: Tensor | None,
    vocab_size: int,
    return_entropy: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(logprobs, entropy or an empty tensor, row_max, all float32, row_sum float64), each (T,).

    logits (T, V) float32, bfloat16 or float16, any row stride; labels (T,) int32 or int64;
    temperature a float or (T,) or (1,) float32; mask (T,) bool. One launch; two where rows are few.
    """
    num_rows = logits.shape[0]
    float32, float64 = (
        {"dtype": d, "device": logits.device} for d in (torch.float32, torch.float64)
    )
    logprobs, row_max = torch.empty(num_rows, **float32), torch.empty(num_rows, **float32)
    entropy = torch.empty(num_rows if return_entropy else 0, **float32)
    row_sum = torch.empty(num_rows, **float64)
    if num_rows == 0:
        return logprobs, entropy, row_max, row_sum
    tile = vocab_tile(vocab_size, logits.dtype, reads_vectors(logits, vocab_size))
    num_segments = triton.cdiv(vocab_size, tile.segment_columns)
    splits = splits_rows(num_rows, num_segments, logits.device)
    partials = row_sum.new_empty((num_rows, num_segments, 3) if splits else 0)
    pointers, options = _row_arguments(temperature, mask, row_max)
    arguments = (
        *(logits, labels, *pointers, partials, logprobs, entropy, row_max, row_sum),
        *(logits.stride(0), vocab_size, num_segments, *options),
    )
    with device_of(logits):
        _token_logprobs_fwd_kernel[(num_rows * num_segments if splits else num_rows,)](
            *arguments,
            SPLIT=splits,
            WITH_ENTROPY=return_entropy,
            **tile.constexprs(),
            **tile.options(),
        )
        if splits:
            _token_logprobs_merge_kernel[(num_rows,)](
                *arguments, WITH_ENTROPY=return_entropy, **MERGE_OPTIONS
            )
    return logprobs, entropy, row_max, row_sum


def token_logprobs_bwd(
    dlogprobs: Tensor,
    dentropy: Tensor | None,
    logits: Tensor,
    labels: Tensor,
    temperature: float | Tensor,
    mask: Tensor | None,
    vocab_size: int,
    row_max: Tensor,
    row_sum: Tensor,
    entropy: Tensor | None,
    out: Tensor | None = None,
) -> Tensor:
    """dlogits (T, V): contiguous, or `out` (any row stride and float dtype; it may be logits).

    dlogprobs and dentropy (T,) float32; row_max, row_sum and entropy as the forward gave them.
    Columns from vocab_size on are 0. One launch.
    """
    if out is None:
        out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    num_rows, num_columns = logits.shape
    if num_rows == 0:
        return out
    in_vectors = reads_vectors(logits, num_columns) and writes_vectors(out)
    tile = vocab_tile(vocab_size, logits.dtype, in_vectors)
    num_segments = triton.cdiv(num_columns, tile.segment_columns)
    pointers, options = _row_arguments(temperature, mask, row_max)
    with device_of(logits):
        _token_logprobs_bwd_kernel[(num_rows * num_segments,)](
            *(dlogprobs, row_max if dentropy is None else dentropy, logits, labels, *pointers),
            *(row_max, row_sum, row_max if entropy is None else entropy, out),
            *(logits.stride(0), out.stride(0), vocab_size, num_columns, num_segments, *options),
            HAS_DENTROPY=dentropy is not None,
            **tile.constexprs(),
            **tile.options(),
        )
    return out
