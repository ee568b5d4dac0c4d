// Tile kernels for AVX2 with FMA and F16C; called only where the CPU has them.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "logprobs_tiles.hpp"

// After the standard headers: their inline functions must not be compiled for this target.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif

#define XRPO_ISA isa_avx2
#define XRPO_LANES 8
#include "logprobs_simd.hpp"

#if defined(__clang__)
#pragma clang attribute pop
#endif

const xrpo::TileKernels& xrpo::avx2_tile_kernels() noexcept {
    static constexpr TileKernels KERNELS = {"avx2", isa_avx2::stats, isa_avx2::gradient};
    return KERNELS;
}
#endif
