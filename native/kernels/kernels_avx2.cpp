// The kernels for AVX2, built with that set's flags (CMakeLists.txt); empty for other processors.
#include "kernels/kernel_table.h"

#if defined(__AVX2__)
#define HEADRACE_ISA avx2
// clang-format off: the lanes come first, the others are written over them
#include "kernels/simd_avx2.h"
#include "kernels/kernels_float.h"
#include "kernels/kernels_attention.h"
#include "kernels/kernels_peak.h"
#include "kernels/kernels_quantise.h"
#include "kernels/kernels_linear.h"
// clang-format on

namespace headrace {
const KernelTable* avx2_table() { return avx2::make_table(); }
}  // namespace headrace
#else
namespace headrace {
const KernelTable* avx2_table() { return nullptr; }
}  // namespace headrace
#endif
