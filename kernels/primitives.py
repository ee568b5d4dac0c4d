"""Device functions shared by the kernels: the running (max, sum, deviation) of a softmax row.

Legend: V columns of a row; a tile is [TILE_ROWS, LANES * VEC] of them, read so that one thread
(lane) holds VEC consecutive columns of each tile row.

    max = max_v x_v,   sum = sum_v exp((x_v - max) / temperature),
    dev = sum_v exp((x_v - max) / temperature) (x_v - max)                (for the entropy)

Each lane keeps its own triple: a tile costs it one maximum over its columns, one exp per column and
one to rescale, and no communication. Lanes meet at the end of a segment, in float64; segments meet
in order. exp((x - max) / temperature) is computed as exp2((x - max) * scale) with scale = log2(e) /
temperature: the difference first, so that a constant added to the row changes nothing. Columns that
are all -inf have max -inf and sum 0; a maximum of -inf is never subtracted. NaN and +inf make the
sum NaN.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
MINUS_INF = tl.constexpr(float("-inf"))
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def usable_label(labels_ptr, mask_ptr, row, has_mask, vocab_size):
    """(is the row scored, its label int32, or -1 where the row must not be read)."""
    scored = True
    if has_mask:
        scored = tl.load(mask_ptr + row) != 0
    label = tl.load(labels_ptr + row).to(tl.int64)
    is_usable = scored & (label >= 0) & (label < vocab_size)
    return scored, tl.where(is_usable, label, -1).to(tl.int32)


@triton.jit
def row_temperature(temperature_ptr, temperature, temperature_stride, is_tensor, row):
    """float32 temperature of a row: the scalar, or one of a tensor."""
    value = temperature
    if is_tensor:
        value = tl.load(temperature_ptr + row * temperature_stride)
    return value


@triton.jit
def exp2_scale(temperature):
    """float32 log2(e) / temperature, by a float64 division: GPUs divide float32 to 2 ulp."""
    return (1.0 / temperature.to(tl.float64) * LOG2_E).to(tl.float32)


@triton.jit
def finite_or_zero(maximum):
    """A maximum that can be subtracted: 0 for -inf, whose terms are all exp(-inf) = 0 anyway."""
    return tl.where(maximum == MINUS_INF, 0.0, maximum)


@triton.jit
def shift_from(old_max, new_max):
    """old_max - new_max, finite: 0 where old_max is -inf (its sum is 0), clamped on overflow."""
    return tl.where(old_max == MINUS_INF, 0.0, tl.maximum(old_max - new_max, LOWEST))


@triton.jit
def tile_offsets(TILE_ROWS: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr):
    """[TILE_ROWS, LANES * VEC] consecutive columns."""
    width: tl.constexpr = LANES * VEC
    return tl.arange(0, TILE_ROWS)[:, None] * width + tl.arange(0, width)[None, :]


@triton.jit
def row_start(rows_ptr, row, row_stride, VEC: tl.constexpr):
    """Pointer to a row; with VEC > 1 the launcher knows that it is on a 16-byte boundary."""
    row_ptr = rows_ptr + row.to(tl.int64) * row_stride
    return tl.multiple_of(row_ptr, 16) if VEC > 1 else row_ptr


@triton.jit
def load_tail(row_ptr, offs_v, stop, VEC: tl.constexpr):
    """Columns offs_v of a row as float32, -inf from `stop` on.

    Loads whole vectors: the launcher knows up to VEC - 1 columns past `stop` to be readable.
    """
    readable = tl.cdiv(stop, VEC) * VEC
    x = tl.load(row_ptr + offs_v, mask=offs_v < readable, other=MINUS_INF).to(tl.float32)
    return tl.where(offs_v < stop, x, MINUS_INF)


@triton.jit
def add_tile(
    x,
    lane_max,
    lane_sum,
    lane_dev,
    scale,
    LANES: tl.constexpr,
    VEC: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
):
    """The lanes' triples after one more tile x, [TILE_ROWS, LANES * VEC]."""
    tile_max = tl.max(tl.reshape(tl.max(x, 0), [LANES, VEC]), 1)
    new_max = tl.maximum(lane_max, tile_max)
    ref = finite_or_zero(new_max)
    ref_v = tl.reshape(tl.broadcast_to(ref[:, None], [LANES, VEC]), [LANES * VEC])
    diff = x - ref_v[None, :]
    exp = tl.exp2(diff * scale)
    shift = shift_from(lane_max, ref)
    rescale = tl.exp2(shift * scale)
    if WITH_ENTROPY:
        # exp is 0 where diff is -inf: the clamp makes their product 0 instead of NaN.
        dev = exp * tl.maximum(diff, LOWEST)
        tile_dev = tl.sum(tl.reshape(tl.sum(dev, 0), [LANES, VEC]), 1)
        lane_dev = rescale * lane_dev + (rescale * shift) * lane_sum + tile_dev
    tile_sum = tl.sum(tl.reshape(tl.sum(exp, 0), [LANES, VEC]), 1)
    lane_sum = rescale * lane_sum + tile_sum
    return new_max, lane_sum, lane_dev


@triton.jit
def reduce_lanes(lane_max, lane_sum, lane_dev, scale, WITH_ENTROPY: tl.constexpr):
    """One triple from the lanes': max float32, sum and dev float64."""
    row_max = tl.max(lane_max, 0)
    shift = shift_from(lane_max, finite_or_zero(row_max))
    weight = tl.exp2(shift * scale).to(tl.float64)
    row_sum = tl.sum(weight * lane_sum.to(tl.float64), 0)
    row_dev = row_sum * 0.0
    if WITH_ENTROPY:
        dev = lane_dev.to(tl.float64) + shift.to(tl.float64) * lane_sum.to(tl.float64)
        row_dev = tl.sum(weight * dev, 0)
    return row_max, row_sum, row_dev


@triton.jit
def empty_stats():
    """The triple of no columns: neutral in `merge`, to the bit."""
    zero = tl.full((), 0.0, tl.float64)
    return tl.full((), MINUS_INF, tl.float32), zero, zero


@triton.jit
def merge(max_a, sum_a, dev_a, max_b, sum_b, dev_b, scale):
    """The triple of two sets of columns: max float32, sum and dev float64."""
    new_max = tl.maximum(max_a, max_b)
    ref = finite_or_zero(new_max)
    shift_a = shift_from(max_a, ref)
    shift_b = shift_from(max_b, ref)
    weight_a = tl.exp2(shift_a * scale).to(tl.float64)
    weight_b = tl.exp2(shift_b * scale).to(tl.float64)
    new_sum = weight_a * sum_a + weight_b * sum_b
    new_dev = weight_a * (dev_a + shift_a.to(tl.float64) * sum_a) + weight_b * (
        dev_b + shift_b.to(tl.float64) * sum_b
    )
    return new_max, new_sum, new_dev
