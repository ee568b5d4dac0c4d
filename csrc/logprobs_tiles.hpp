// What the vectorised tile kernels take and give; one table per instruction set.
#pragma once

#include <cstdint>

namespace xrpo {

enum class Dtype { F32 = 0, BF16 = 1, F16 = 2, F64 = 3 };

// exp(x / T) = 2^(x scale), for x >= lowest: scale * lowest = -126, the smallest normal float.
struct ExpScale {
    float scale, lowest;
};

// Of one tile: max = max x, sum = sum exp((x - max) / T), weighted = sum exp((x - max) / T) (x - max).
struct TileStats {
    double max, sum, weighted;
};

// dx = exp((x - max) / T) (constant + slope (x - max)); finite.
struct GradientScale {
    ExpScale exp;
    float max, constant, slope;
};

struct TileKernels {
    const char* name;
    // `apart`: sum the elements at the max apart from the others. Beside a 1, float would lose the
    // small ones, and with them 1 - p of a confident token: for the tile that holds the row's max.
    TileStats (*stats)(Dtype dtype, const void* x, std::int64_t n, const ExpScale& scale,
                       bool with_weighted, bool apart);
    // `out` may be x. `streaming`: past the cache, for outputs larger than it.
    void (*gradient)(Dtype dtype, const void* x, void* out, std::int64_t n,
                     const GradientScale& scale, bool with_slope, bool streaming);
};

const TileKernels& base_tile_kernels() noexcept;
#if defined(__x86_64__)
const TileKernels& avx2_tile_kernels() noexcept;
const TileKernels& avx512_tile_kernels() noexcept;
#endif

}  // namespace xrpo
