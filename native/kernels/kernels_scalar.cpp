// The kernels in plain C++, for every processor: always built, always tested.
#define HEADRACE_ISA scalar
#include "kernels/simd_scalar.h"

#include "kernels/kernels_float.h"
#include "kernels/kernels_linear.h"

namespace headrace {
const KernelTable* scalar_table() { return scalar::make_table(); }
}  // namespace headrace
