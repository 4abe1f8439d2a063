// The kernels for AMX with int8 tiles: those of AVX-512, but for quantised products of many rows.
// Built with that set's flags (CMakeLists.txt); empty for other processors.
#include "kernels/kernel_table.h"

#if defined(__AMX_INT8__) && defined(__linux__)
#define HEADRACE_ISA amx
// clang-format off: the lanes come first, the others are written over them
#include "kernels/simd_avx512.h"
#include "kernels/tile_amx.h"
#include "kernels/kernels_linear_super.h"
#include "kernels/kernels_linear_amx.h"
// clang-format on

namespace headrace {
const KernelTable* amx_table() { return amx::make_table(); }
}  // namespace headrace
#else
namespace headrace {
const KernelTable* amx_table() { return nullptr; }
}  // namespace headrace
#endif
