// The tile kernels, in terms of vectors of XRPO_LANES floats. Included once per instruction set,
// by a file that has chosen the target, the lanes and the namespace XRPO_ISA. Only the generic
// vector extensions of gcc and clang, and the few functions where they give slow code.
//
// exp(d / T) = 2^(d scale) = 2^n 2^r, n the nearest integer, |r| <= 1/2, by a polynomial of degree 5
// that is 1 at 0 (relative error 1.7e-7, fitted by us). Fused multiply-adds are written out: the
// file is compiled with -ffp-contract=off.

namespace xrpo {
namespace XRPO_ISA {

typedef float f32v __attribute__((vector_size(4 * XRPO_LANES)));
typedef std::int32_t i32v __attribute__((vector_size(4 * XRPO_LANES)));
typedef std::uint32_t u32v __attribute__((vector_size(4 * XRPO_LANES)));
typedef double f64v __attribute__((vector_size(8 * XRPO_LANES)));
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
static inline void stream(void* p, f32v x) { _mm512_stream_ps((float*)p, x); }
static inline void stream(void* p, u16v x) { _mm256_stream_si256((__m256i*)p, (__m256i)x); }
#elif XRPO_LANES == 8
static inline f32v fused(f32v a, f32v b, f32v c) { return (f32v)_mm256_fmadd_ps(a, b, c); }
static inline f32v larger(f32v a, f32v b) { return (f32v)_mm256_max_ps(a, b); }
static inline f32v from_half(u16v h) { return (f32v)_mm256_cvtph_ps((__m128i)h); }
static inline u16v to_half(f32v x) { return (u16v)_mm256_cvtps_ph(x, 0); }
static inline void stream(void* p, f32v x) { _mm256_stream_ps((float*)p, x); }
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
    return __builtin_convertvector(half | (bits & 0x80000000u) >> 16, u16v);
}

template <class V>
static inline void stream(void* p, V x) {
    std::memcpy(p, &x, sizeof x);
}
#endif

static inline f32v splat(float x) { return x - f32v{}; }

template <class V, class T>
static inline V load_as(const T* p) {
    V x;
    std::memcpy(&x, p, sizeof x);
    return x;
}

// The unit of work: 2 * XRPO_LANES elements, in any fixed order.
constexpr std::int64_t PAIR = 2 * XRPO_LANES;
constexpr int INTO_SECOND_LEVEL = 2;  // of __builtin_prefetch: not into the first-level cache
struct Pair {
    f32v a, b;
};

static inline Pair load(const float* p) {
    return {load_as<f32v>(p), load_as<f32v>(p + XRPO_LANES)};
}
// Even and odd elements: no shuffle, on a little-endian CPU.
static inline Pair load(const bf16* p) {
    const u32v both = load_as<u32v>(p);
    return {(f32v)(both << 16), (f32v)(both & 0xffff0000u)};
}
static inline Pair load(const f16* p) {
    return {from_half(load_as<u16v>(p)), from_half(load_as<u16v>(p + XRPO_LANES))};
}

// The nearest bfloat16, ties to even, in the upper half of the word, what is left of x in the lower.
// Not for NaN.
static inline u32v to_bf16(f32v x) {
    const u32v bits = (u32v)x;
    return bits + 0x7fffu + ((bits >> 16) & 1u);
}

template <bool STREAMING, class V>
static inline void put(void* p, V x) {
    if (STREAMING) {
        stream(p, x);
    } else {
        std::memcpy(p, &x, sizeof x);
    }
}

template <bool STREAMING>
static inline void store(float* p, Pair x) {
    put<STREAMING>(p, x.a);
    put<STREAMING>(p + XRPO_LANES, x.b);
}
template <bool STREAMING>
static inline void store(bf16* p, Pair x) {
    put<STREAMING>(p, (f32v)(to_bf16(x.a) >> 16 | (to_bf16(x.b) & 0xffff0000u)));
}
template <bool STREAMING>
static inline void store(f16* p, Pair x) {
    put<STREAMING>(p, to_half(x.a));
    put<STREAMING>(p + XRPO_LANES, to_half(x.b));
}

static inline void set_minus_inf(float& x) { x = -__builtin_inff(); }
static inline void set_minus_inf(bf16& x) { x.bits = 0xff80; }
static inline void set_minus_inf(f16& x) { x.bits = 0xfc00; }

// n < PAIR elements, -inf behind them.
template <class T>
static inline Pair load_part(const T* p, std::int64_t n) {
    T padded[PAIR];
    for (std::int64_t i = 0; i < PAIR; ++i) {
        set_minus_inf(padded[i]);
    }
    std::memcpy(padded, p, static_cast<std::size_t>(n) * sizeof(T));
    return load(padded);
}

// d <= 0 or NaN, not below scale.lowest.
static inline f32v exp_scaled(f32v d, f32v scale) {
    // Adding 1.5 * 2^23 rounds to an integer and leaves it in the low bits.
    const f32v shifter = splat(0x1.8p23f);
    const f32v shifted = fused(d, scale, shifter);
    const f32v r = fused(d, scale, shifter - shifted);
    f32v y = fused(splat(0x1.5bba14p-10f), r, splat(0x1.3cea88p-7f));
    y = fused(y, r, splat(0x1.c6b752p-5f));
    y = fused(y, r, splat(0x1.ebf9bcp-3f));
    y = fused(y, r, splat(0x1.62e42ap-1f));
    y = fused(y, r, splat(1.0f));
    return (f32v)((i32v)y + ((i32v)shifted << 23));
}

// Sums of a tile: FOLD elements per lane are added in float, then they go to double.
constexpr int FOLD = 8;
struct Totals {
    f64v sum, weighted;
    i32v at_max;
};

struct Terms {
    f32v sum, weighted;
};

// APART: the elements at the max, exp 1 each, are counted instead of added, and what underflows is 0.
template <bool WEIGHTED, bool APART>
static inline Terms terms_of(f32v x, f32v max, f32v lowest, f32v scale, i32v& at_max) {
    const f32v d = larger(lowest, x - max);
    f32v e = exp_scaled(d, scale);
    if (APART) {
        const i32v is_max = d == f32v{};
        at_max -= is_max;
        e = (f32v)((i32v)e & ~is_max & (i32v)(d != lowest));
    }
    return {e, WEIGHTED ? e * d : f32v{}};
}

// Adds a pair to the terms of its two halves.
template <bool WEIGHTED, bool APART>
static inline void accumulate(Terms (&halves)[2], const Pair& x, f32v max, f32v lowest, f32v scale,
                              i32v& at_max) {
    const Terms a = terms_of<WEIGHTED, APART>(x.a, max, lowest, scale, at_max);
    const Terms b = terms_of<WEIGHTED, APART>(x.b, max, lowest, scale, at_max);
    halves[0] = {halves[0].sum + a.sum, halves[0].weighted + a.weighted};
    halves[1] = {halves[1].sum + b.sum, halves[1].weighted + b.weighted};
}

template <bool WEIGHTED>
static inline void add(Totals& totals, const Terms (&halves)[2]) {
    totals.sum += __builtin_convertvector(halves[0].sum + halves[1].sum, f64v);
    if (WEIGHTED) {
        totals.weighted +=
            __builtin_convertvector(halves[0].weighted + halves[1].weighted, f64v);
    }
}

template <class V>
static inline double sum_lanes(const V& x) {
    double total = 0;
    for (int i = 0; i < XRPO_LANES; ++i) {
        total += static_cast<double>(x[i]);
    }
    return total;
}

template <class T>
static inline float tile_max(const T* x, std::int64_t n) {
    Pair top[2];
    for (auto& t : top) {
        t.a = t.b = splat(-__builtin_inff());
    }
    std::int64_t i = 0;
    for (; i + 2 * PAIR <= n; i += 2 * PAIR) {
        for (int k = 0; k < 2; ++k) {
            const Pair p = load(x + i + k * PAIR);
            top[k] = {larger(p.a, top[k].a), larger(p.b, top[k].b)};
        }
    }
    for (; i < n; i += PAIR) {
        const Pair p = i + PAIR <= n ? load(x + i) : load_part(x + i, n - i);
        top[0] = {larger(p.a, top[0].a), larger(p.b, top[0].b)};
    }
    const f32v all = larger(larger(top[0].a, top[0].b), larger(top[1].a, top[1].b));
    float max = all[0];
    for (int k = 1; k < XRPO_LANES; ++k) {
        max = all[k] > max ? all[k] : max;
    }
    return max;
}

template <class T, bool WEIGHTED, bool APART>
static TileStats tile_stats(const T* x, std::int64_t n, const ExpScale& scale) {
    const float top = tile_max(x, n);
    // A tile of -inf alone has no max to subtract; its sum gets weight 0 from the caller.
    const f32v max = splat(top == -__builtin_inff() ? 0.0f : top);
    const f32v factor = splat(scale.scale), lowest = splat(scale.lowest);
    Totals totals = {};
    std::int64_t i = 0;
    for (; i + FOLD * PAIR <= n; i += FOLD * PAIR) {
        Terms halves[2] = {};
        // Unrolled, gcc keeps all the exponentials and spills them.
#pragma GCC unroll 1
        for (int k = 0; k < FOLD; ++k) {
            const T* p = x + i + k * PAIR;
            // The next tile travels while this one is computed: an address only, never read here.
            __builtin_prefetch(p + n, 0, INTO_SECOND_LEVEL);
            accumulate<WEIGHTED, APART>(halves, load(p), max, lowest, factor, totals.at_max);
        }
        add<WEIGHTED>(totals, halves);
    }
    for (; i < n; i += PAIR) {
        Terms halves[2] = {};
        const Pair pair = i + PAIR <= n ? load(x + i) : load_part(x + i, n - i);
        accumulate<WEIGHTED, APART>(halves, pair, max, lowest, factor, totals.at_max);
        add<WEIGHTED>(totals, halves);
    }
    return {static_cast<double>(top), sum_lanes(totals.sum) + sum_lanes(totals.at_max),
            sum_lanes(totals.weighted)};
}

template <bool SLOPE>
static inline f32v gradient_of(f32v x, const GradientScale& scale) {
    const f32v lowest = splat(scale.exp.lowest);
    const f32v d = larger(lowest, x - splat(scale.max));
    const f32v e = exp_scaled(d, splat(scale.exp.scale));
    // Exactly 0 where exp underflows.
    const f32v kept = (f32v)((i32v)e & (i32v)(d != lowest));
    f32v factor = splat(scale.constant);
    if (SLOPE) {
        factor = fused(splat(scale.slope), d, factor);
    }
    return kept * factor;
}

template <bool SLOPE>
static inline Pair gradient_of(Pair x, const GradientScale& scale) {
    return {gradient_of<SLOPE>(x.a, scale), gradient_of<SLOPE>(x.b, scale)};
}

template <class T, bool SLOPE>
static inline void gradient_part(const T* x, T* out, std::int64_t n, const GradientScale& scale) {
    T values[PAIR];
    store<false>(values, gradient_of<SLOPE>(load_part(x, n), scale));
    std::memcpy(static_cast<void*>(out), values, static_cast<std::size_t>(n) * sizeof(T));
}

template <class T, bool SLOPE, bool STREAMING>
static void gradient_span(const T* x, T* out, std::int64_t n, const GradientScale& scale) {
    std::int64_t i = 0;
    const auto misaligned = reinterpret_cast<std::uintptr_t>(out) % sizeof(f32v);
    if (STREAMING && misaligned != 0) {
        const auto head = static_cast<std::int64_t>((sizeof(f32v) - misaligned) / sizeof(T));
        i = head < n ? head : n;
        gradient_part<T, SLOPE>(x, out, i, scale);
    }
    for (; i + PAIR <= n; i += PAIR) {
        store<STREAMING>(out + i, gradient_of<SLOPE>(load(x + i), scale));
    }
    if (i < n) {
        gradient_part<T, SLOPE>(x + i, out + i, n - i, scale);
    }
}

template <class T>
static TileStats stats_of(const void* x, std::int64_t n, const ExpScale& scale, bool weighted,
                          bool apart) {
    const T* row = static_cast<const T*>(x);
    if (apart) {
        return weighted ? tile_stats<T, true, true>(row, n, scale)
                        : tile_stats<T, false, true>(row, n, scale);
    }
    return weighted ? tile_stats<T, true, false>(row, n, scale)
                    : tile_stats<T, false, false>(row, n, scale);
}

template <class T, bool SLOPE>
static void gradient_stored(const T* x, T* out, std::int64_t n, const GradientScale& scale,
                            bool streaming) {
    if (streaming) {
        gradient_span<T, SLOPE, true>(x, out, n, scale);
    } else {
        gradient_span<T, SLOPE, false>(x, out, n, scale);
    }
}

template <class T>
static void gradient_of_span(const void* x, void* out, std::int64_t n, const GradientScale& scale,
                             bool slope, bool streaming) {
    const T* in = static_cast<const T*>(x);
    T* to = static_cast<T*>(out);
    if (slope) {
        gradient_stored<T, true>(in, to, n, scale, streaming);
    } else {
        gradient_stored<T, false>(in, to, n, scale, streaming);
    }
}

static TileStats stats(Dtype dtype, const void* x, std::int64_t n, const ExpScale& scale,
                       bool weighted, bool apart) {
    switch (dtype) {
        case Dtype::BF16:
            return stats_of<bf16>(x, n, scale, weighted, apart);
        case Dtype::F16:
            return stats_of<f16>(x, n, scale, weighted, apart);
        default:
            return stats_of<float>(x, n, scale, weighted, apart);
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
