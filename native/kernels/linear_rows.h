// Where a product's rows come from and where its outputs go.
#pragma once

#include <cstdint>

#include "kernels/kernel_table.h"

namespace headrace::HEADRACE_ISA {

inline int32_t in_row(const LinearArgs& a, int32_t r) { return a.in_rows ? a.in_rows[r] : r; }
inline int32_t out_row(const LinearArgs& a, int32_t r) { return a.out_rows ? a.out_rows[r] : r; }

inline void store_outputs(const LinearArgs& a, int32_t block, int32_t row, Floats acc) {
  float* out = a.out + out_row(a, row) * a.out_stride + int64_t{block} * kBlockOutputs;
  const int32_t left = a.num_outputs - block * kBlockOutputs;
  if (left >= kBlockOutputs) {
    store(out, acc);
  } else {
    store_part(out, acc, left);
  }
}

}  // namespace headrace::HEADRACE_ISA
