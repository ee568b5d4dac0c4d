// Tile kernels for AVX-512 (F, BW, DQ, VL); called only where the CPU has them.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "logprobs_tiles.hpp"

// After the standard headers: their inline functions must not be compiled for this target.
#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,f16c")
#endif

#define XRPO_ISA isa_avx512
#define XRPO_LANES 16
#include "logprobs_simd.hpp"

#if defined(__clang__)
#pragma clang attribute pop
#endif

const xrpo::TileKernels& xrpo::avx512_tile_kernels() noexcept {
    static constexpr TileKernels KERNELS = {"avx512", isa_avx512::stats, isa_avx512::gradient};
    return KERNELS;
}
#endif
