// Tile kernels for every CPU: SSE2 on x86-64, NEON on aarch64.
#include <cstdint>
#include <cstring>
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "logprobs_tiles.hpp"

#define XRPO_ISA isa_base
#define XRPO_LANES 4
#include "logprobs_simd.hpp"

const xrpo::TileKernels& xrpo::base_tile_kernels() noexcept {
    static constexpr TileKernels KERNELS = {"base", isa_base::stats, isa_base::gradient};
    return KERNELS;
}
