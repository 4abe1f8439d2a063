// The kernels in plain C++, for every processor: always built, always tested.
#define HEADRACE_ISA scalar
// clang-format off: the lanes come first, the others are written over them
#include "kernels/simd_scalar.h"
#include "kernels/kernels_float.h"
#include "kernels/kernels_attention.h"
#include "kernels/kernels_peak.h"
#include "kernels/kernels_quantise.h"
#include "kernels/kernels_linear.h"
// clang-format on

namespace headrace {
const KernelTable* scalar_table() { return scalar::make_table(); }
}  // namespace headrace
