// The tile kernels, in terms of vectors of XRPO_LANES floats. Included once per instruction set,
// by a file that has chosen the target, the lanes and the namespace XRPO_ISA. Only the generic
// vector extensions of gcc and clang, and the few functions where they give slow code.
//
// exp(d / T) = 2^(d hi + d lo) = 2^n 2^r, n the nearest integer, |r| <= 1/2, by a polynomial of degree
// 5 that is 1 at 0 (relative error 1.7e-7, fitted by us). Fused multiply-adds are written out: the
// file is compiled with -ffp-contract=off.

namespace xrpo {
namespace XRPO_ISA {

typedef float f32v __attribute__((vector_size(4 * XRPO_LANES)));
typedef std::int32_t i32v __attribute__((vector_size(4 * XRPO_LANES)));
typedef std::uint32_t u32v __attribute__((vector_size(4 * XRPO_LANES)));
typedef std::uint16_t u16v __attribute__((vector_size(2 * XRPO_LANES)));

struct bf16 {
    std::uint16_t bits;
};
struct f16 {
    std::uint16_t bits;
};

#if XRPO_LANES == 16
static inline f32v fused(f32v a, f32v b, f32v c) { return (f32v)_mm512_fmadd_ps(a, b, c); }
// The zero-masked forms are the same instructions, without gcc 12's warnings about its own headers.
constexpr __mmask16 ALL = 0xffff;
static inline f32v larger(f32v a, f32v b) { return (f32v)_mm512_maskz_max_ps(ALL, a, b); }
static inline f32v from_half(u16v h) { return (f32v)_mm512_maskz_cvtph_ps(ALL, (__m256i)h); }
static inline u16v to_half(f32v x) { return (u16v)_mm512_maskz_cvtps_ph(ALL, x, 0); }
static inline void stream(float* p, f32v x) { _mm512_stream_ps(p, x); }
static inline void stream(void* p, u16v x) { _mm256_stream_si256((__m256i*)p, (__m256i)x); }
#elif XRPO_LANES == 8
static inline f32v fused(f32v a, f32v b, f32v c) { return (f32v)_mm256_fmadd_ps(a, b, c); }
static inline f32v larger(f32v a, f32v b) { return (f32v)_mm256_max_ps(a, b); }
static inline f32v from_half(u16v h) { return (f32v)_mm256_cvtph_ps((__m128i)h); }
static inline u16v to_half(f32v x) { return (u16v)_mm256_cvtps_ph(x, 0); }
static inline void stream(float* p, f32v x) { _mm256_stream_ps(p, x); }
static inline void stream(void* p, u16v x) { _mm_stream_si128((__m128i*)p, (__m128i)x); }
#else
#if defined(__aarch64__)
static inline f32v fused(f32v a, f32v b, f32v c) { return (f32v)vfmaq_f32(c, a, b); }
#else
static inline f32v fused(f32v a, f32v b, f32v c) { return a * b + c; }
#endif
// The second operand where one is NaN, as maxps.
static inline f32v larger(f32v a, f32v b) { return a > b ? a : b; }

static inline f32v from_half(u16v h) {
    const u32v wide = __builtin_convertvector(h, u32v);
    const u32v magnitude = (wide & 0x7fffu) << 13;
    const u32v finite = (u32v)((f32v)magnitude * 0x1p112f);
    const u32v value = (wide & 0x7fffu) >= 0x7c00u ? magnitude | 0x7f800000u : finite;
    return (f32v)(value | (wide & 0x8000u) << 16);
}

static inline u16v to_half(f32v x) {
    const u32v bits = (u32v)x, magnitude = bits & 0x7fffffffu;
    const u32v normal = (magnitude + 0xc8000fffu + ((magnitude >> 13) & 1u)) >> 13;
    const u32v tiny = (u32v)((f32v)magnitude + 0.5f) - 0x3f000000u;
    u32v half = magnitude < 0x38800000u ? tiny : normal;
    half = magnitude >= 0x477ff000u ? (half & 0u) + 0x7c00u : half;
    half = magnitude > 0x7f800000u ? (half & 0u) + 0x7e00u : half;
    return __builtin_convertvector(half | (bits & 0x80000000u) >> 16, u16v);
}

static inline void stream(float* p, f32v x) { std::memcpy(p, &x, sizeof x); }
static inline void stream(void* p, u16v x) { std::memcpy(p, &x, sizeof x); }
#endif

static inline f32v splat(float x) { return x - f32v{}; }

static inline u16v load_bits(const void* p) {
    u16v bits;
    std::memcpy(&bits, p, sizeof bits);
    return bits;
}

static inline f32v load(const float* p) {
    f32v x;
    std::memcpy(&x, p, sizeof x);
    return x;
}
static inline f32v load(const bf16* p) {
    return (f32v)(__builtin_convertvector(load_bits(p), u32v) << 16);
}
static inline f32v load(const f16* p) { return from_half(load_bits(p)); }

// Rounds to nearest even; a NaN stays one.
static inline u16v to_bf16(f32v x) {
    const u32v bits = (u32v)x;
    const u32v rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const u32v is_nan = (u32v)(x != x);
    return __builtin_convertvector((is_nan & 0x7fc0u) | (~is_nan & rounded), u16v);
}

static inline f32v narrow(f32v x, const float*) { return x; }
static inline u16v narrow(f32v x, const bf16*) { return to_bf16(x); }
static inline u16v narrow(f32v x, const f16*) { return to_half(x); }

template <class T, class V>
static inline void put(T* p, V x, bool streaming) {
    if (streaming) {
        stream(p, x);
    } else {
        std::memcpy(static_cast<void*>(p), &x, sizeof x);
    }
}

// n < XRPO_LANES elements, the other lanes -inf.
template <class T>
static inline f32v load_part(const T* p, std::int64_t n) {
    T padded[XRPO_LANES] = {};
    std::memcpy(padded, p, static_cast<std::size_t>(n) * sizeof(T));
    f32v x = load(padded);
    for (std::int64_t i = n; i < XRPO_LANES; ++i) {
        x[i] = -__builtin_inff();
    }
    return x;
}

// d <= 0 or NaN, not below scale.lowest.
static inline f32v exp_scaled(f32v d, f32v hi, f32v lo) {
    // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits.
    const f32v shifter = splat(0x1.8p23f);
    const f32v shifted = fused(d, hi, shifter);
    const f32v n = shifted - shifter;
    const f32v r = fused(d, lo, fused(d, hi, -n));
    f32v y = fused(splat(0x1.5bba14p-10f), r, splat(0x1.3cea88p-7f));
    y = fused(y, r, splat(0x1.c6b752p-5f));
    y = fused(y, r, splat(0x1.ebf9bcp-3f));
    y = fused(y, r, splat(0x1.62e42ap-1f));
    y = fused(y, r, splat(1.0f));
    return (f32v)((i32v)y + ((i32v)shifted << 23));
}

static inline double sum_lanes(f32v x) {
    double total = 0;
    for (int i = 0; i < XRPO_LANES; ++i) {
        total += static_cast<double>(x[i]);
    }
    return total;
}

// Two accumulators of each kind keep the adders busy; their order is fixed.
struct Sums {
    f32v sum[2], weighted[2];
};

template <bool WEIGHTED>
static inline void accumulate(Sums& sums, int slot, f32v x, f32v max, f32v lowest, f32v hi,
                              f32v lo) {
    const f32v d = larger(lowest, x - max);
    const f32v e = exp_scaled(d, hi, lo);
    sums.sum[slot] += e;
    if (WEIGHTED) {
        sums.weighted[slot] = fused(e, d, sums.weighted[slot]);
    }
}

template <class T>
static inline float tile_max(const T* x, std::int64_t n) {
    f32v top[4];
    for (auto& t : top) {
        t = splat(-__builtin_inff());
    }
    std::int64_t i = 0;
    for (; i + 4 * XRPO_LANES <= n; i += 4 * XRPO_LANES) {
        for (int k = 0; k < 4; ++k) {
            top[k] = larger(load(x + i + k * XRPO_LANES), top[k]);
        }
    }
    for (; i < n; i += XRPO_LANES) {
        const bool is_full = i + XRPO_LANES <= n;
        top[0] = larger(is_full ? load(x + i) : load_part(x + i, n - i), top[0]);
    }
    const f32v all = larger(larger(top[0], top[1]), larger(top[2], top[3]));
    float max = all[0];
    for (int k = 1; k < XRPO_LANES; ++k) {
        max = all[k] > max ? all[k] : max;
    }
    return max;
}

template <class T, bool WEIGHTED>
static TileStats tile_stats(const T* x, std::int64_t n, const ExpScale& scale) {
    const float top = tile_max(x, n);
    // A tile of -inf alone has no max to subtract; its sum gets weight 0 from the caller.
    const f32v max = splat(top == -__builtin_inff() ? 0.0f : top);
    const f32v hi = splat(scale.hi), lo = splat(scale.lo), lowest = splat(scale.lowest);
    Sums sums = {};
    std::int64_t i = 0;
    for (; i + 2 * XRPO_LANES <= n; i += 2 * XRPO_LANES) {
        accumulate<WEIGHTED>(sums, 0, load(x + i), max, lowest, hi, lo);
        accumulate<WEIGHTED>(sums, 1, load(x + i + XRPO_LANES), max, lowest, hi, lo);
    }
    for (; i < n; i += XRPO_LANES) {
        const bool is_full = i + XRPO_LANES <= n;
        const f32v part = is_full ? load(x + i) : load_part(x + i, n - i);
        accumulate<WEIGHTED>(sums, 0, part, max, lowest, hi, lo);
    }
    return {static_cast<double>(top), sum_lanes(sums.sum[0] + sums.sum[1]),
            sum_lanes(sums.weighted[0] + sums.weighted[1])};
}

template <bool SLOPE>
static inline f32v gradient_of(f32v x, const GradientScale& scale) {
    const f32v lowest = splat(scale.exp.lowest);
    const f32v d = larger(lowest, x - splat(scale.max));
    const f32v e = exp_scaled(d, splat(scale.exp.hi), splat(scale.exp.lo));
    // Exactly 0 where exp underflows; a NaN passes.
    const f32v kept = (f32v)((i32v)e & (i32v)(d != lowest));
    f32v factor = splat(scale.constant);
    if (SLOPE) {
        factor = fused(splat(scale.slope), d, factor);
    }
    return kept * factor;
}

template <class T, bool SLOPE>
static inline void gradient_part(const T* x, T* out, std::int64_t n, const GradientScale& scale) {
    const auto values = narrow(gradient_of<SLOPE>(load_part(x, n), scale), x);
    std::memcpy(static_cast<void*>(out), &values, static_cast<std::size_t>(n) * sizeof(T));
}

template <class T, bool SLOPE>
static void gradient_span(const T* x, T* out, std::int64_t n, const GradientScale& scale,
                          bool streaming) {
    std::int64_t i = 0;
    constexpr std::size_t STORE_BYTES = sizeof(T) * XRPO_LANES;
    const auto misaligned = reinterpret_cast<std::uintptr_t>(out) % STORE_BYTES;
    if (streaming && misaligned != 0) {
        const auto head = static_cast<std::int64_t>((STORE_BYTES - misaligned) / sizeof(T));
        i = head < n ? head : n;
        gradient_part<T, SLOPE>(x, out, i, scale);
    }
    for (; i + XRPO_LANES <= n; i += XRPO_LANES) {
        put(out + i, narrow(gradient_of<SLOPE>(load(x + i), scale), x), streaming);
    }
    if (i < n) {
        gradient_part<T, SLOPE>(x + i, out + i, n - i, scale);
    }
}

template <class T>
static TileStats stats_of(const void* x, std::int64_t n, const ExpScale& scale, bool weighted) {
    const T* row = static_cast<const T*>(x);
    return weighted ? tile_stats<T, true>(row, n, scale) : tile_stats<T, false>(row, n, scale);
}

template <class T>
static void gradient_of_span(const void* x, void* out, std::int64_t n, const GradientScale& scale,
                             bool slope, bool streaming) {
    const T* in = static_cast<const T*>(x);
    T* to = static_cast<T*>(out);
    if (slope) {
        gradient_span<T, true>(in, to, n, scale, streaming);
    } else {
        gradient_span<T, false>(in, to, n, scale, streaming);
    }
}

static TileStats stats(Dtype dtype, const void* x, std::int64_t n, const ExpScale& scale,
                       bool weighted) {
    switch (dtype) {
        case Dtype::BF16:
            return stats_of<bf16>(x, n, scale, weighted);
        case Dtype::F16:
            return stats_of<f16>(x, n, scale, weighted);
        default:
            return stats_of<float>(x, n, scale, weighted);
    }
}

static void gradient(Dtype dtype, const void* x, void* out, std::int64_t n,
                     const GradientScale& scale, bool slope, bool streaming) {
    switch (dtype) {
        case Dtype::BF16:
            return gradient_of_span<bf16>(x, out, n, scale, slope, streaming);
        case Dtype::F16:
            return gradient_of_span<f16>(x, out, n, scale, slope, streaming);
        default:
            return gradient_of_span<float>(x, out, n, scale, slope, streaming);
    }
}

}  // namespace XRPO_ISA
}  // namespace xrpo
