#include "kernels/kernel_table.h"

#include <atomic>

namespace headrace {
namespace {

std::atomic<Isa>& chosen_isa() {
  static std::atomic<Isa> isa{parse_isa("auto")};
  return isa;
}

}  // namespace

const KernelTable& kernel_table(Isa isa) {
  const KernelTable* table = nullptr;
  if (isa == Isa::Avx2) table = avx2_table();
  if (isa == Isa::AvxVnni) table = avx_vnni_table();
  if (isa == Isa::Avx512) table = avx512_table();
  if (isa == Isa::Amx) table = amx_table();
  if (isa == Isa::Neon) table = neon_table();
  if (isa == Isa::NeonI8mm) table = neon_i8mm_table();
  return table != nullptr ? *table : *scalar_table();
}

const KernelTable& kernels() { return kernel_table(chosen_isa().load(std::memory_order_relaxed)); }

Isa current_isa() { return chosen_isa().load(); }

void set_isa(Isa isa) { chosen_isa().store(isa); }

}  // namespace headrace
