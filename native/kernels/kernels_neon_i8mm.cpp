// The kernels for NEON with dot products and int8 matrix products, built with that set's flags;
// empty for other processors.
#include "kernels/kernel_table.h"

#if defined(__aarch64__) && defined(__ARM_FEATURE_MATMUL_INT8)
#define HEADRACE_ISA neon_i8mm
// clang-format off: the lanes come first, the others are written over them
#include "kernels/simd_neon.h"
#include "kernels/kernels_float.h"
#include "kernels/kernels_attention.h"
#include "kernels/kernels_peak.h"
#include "kernels/kernels_quantise.h"
#include "kernels/kernels_linear.h"
#include "kernels/kernels_linear_i8mm.h"
// clang-format on

namespace headrace {
const KernelTable* neon_i8mm_table() { return neon_i8mm::make_i8mm_table(); }
}  // namespace headrace
#else
namespace headrace {
const KernelTable* neon_i8mm_table() { return nullptr; }
}  // namespace headrace
#endif
