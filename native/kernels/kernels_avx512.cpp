// The kernels for AVX-512 with VNNI, built with that set's flags (CMakeLists.txt); empty for other
// processors.
#include "kernels/kernel_table.h"

#if defined(__AVX512VNNI__)
#define HEADRACE_ISA avx512
// clang-format off: the lanes come first, the others are written over them
#include "kernels/simd_avx512.h"
#include "kernels/kernels_float.h"
#include "kernels/kernels_attention.h"
#include "kernels/kernels_peak.h"
#include "kernels/kernels_quantise.h"
#include "kernels/kernels_linear.h"
// clang-format on

namespace headrace {
const KernelTable* avx512_table() { return avx512::make_table(); }
}  // namespace headrace
#else
namespace headrace {
const KernelTable* avx512_table() { return nullptr; }
}  // namespace headrace
#endif
