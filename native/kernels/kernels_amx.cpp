// The kernels for AMX with int8 tiles: those of AVX-512, but for products with many rows. Built
// with that set's flags (CMakeLists.txt); empty for other processors.
#include "kernels/kernel_table.h"

namespace headrace {
const KernelTable* amx_table() { return avx512_table(); }
}  // namespace headrace
