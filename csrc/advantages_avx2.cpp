// Row kernels of the advantages for AVX2; called only where the CPU has it.
#if defined(__x86_64__)
#include <cstdint>
#include <cstring>

#include "advantages_rows.hpp"

// After the standard headers: their inline functions must not be compiled for this target.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC target("avx2")
#endif

#define XRPO_ISA isa_avx2
#define XRPO_LANES 4
#include "advantages_simd.hpp"

#if defined(__clang__)
#pragma clang attribute pop
#endif

const xrpo::RowKernels& xrpo::avx2_row_kernels() noexcept {
    static constexpr RowKernels KERNELS = {isa_avx2::load, isa_avx2::statistics,
                                           isa_avx2::reduce_group, isa_avx2::finish};
    return KERNELS;
}
#endif
