// The kernels for NEON with the dot-product extension, built with that set's flags; empty for other
// processors.
#include "kernels/kernel_table.h"

#if defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
#define HEADRACE_ISA neon
// clang-format off: the lanes come first, the others are written over them
#include "kernels/simd_neon.h"
#include "kernels/kernels_float.h"
#include "kernels/kernels_attention.h"
#include "kernels/kernels_peak.h"
#include "kernels/kernels_quantise.h"
#include "kernels/kernels_linear.h"
// clang-format on

namespace headrace {
const KernelTable* neon_table() { return neon::make_table(); }
}  // namespace headrace
#else
namespace headrace {
const KernelTable* neon_table() { return nullptr; }
}  // namespace headrace
#endif
