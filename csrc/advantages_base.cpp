// Row kernels of the advantages for every CPU: SSE2 on x86-64, NEON on aarch64.
#include <cstdint>
#include <cstring>

#include "advantages_rows.hpp"

#define XRPO_ISA isa_base
#define XRPO_LANES 2
#include "advantages_simd.hpp"

const xrpo::RowKernels& xrpo::base_row_kernels() noexcept {
    static constexpr RowKernels KERNELS = {isa_base::load, isa_base::statistics,
                                           isa_base::reduce_group, isa_base::finish};
    return KERNELS;
}
