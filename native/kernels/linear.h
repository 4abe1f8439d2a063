// Products with packed matrices, threaded over blocks of outputs.
#pragma once

#include <cstdint>
#include <span>

#include "base/array_pool.h"
#include "base/thread_pool.h"
#include "kernels/format.h"
#include "kernels/kernel_table.h"

namespace headrace {

// The rows of an input as the quantised kernels read them.
class QuantisedRows {
 public:
  QuantisedRows(int32_t num_rows, int32_t cols, int32_t group);

  // Throws Error(Numeric) naming `op` and the first row that holds a NaN or an infinity.
  static QuantisedRows of(ThreadPool& pool, const float* x, int32_t num_rows, int32_t cols,
                          int32_t group, const char* op);
  // Quantises one row; false if it holds a NaN or an infinity.
  bool quantise(const KernelTable& table, const float* x, int32_t row);

  int32_t group() const { return group_; }
  void bind(LinearArgs& args) const;

 private:
  int32_t cols_, group_, groups_;
  PoolBuffer<int8_t> codes_;
  PoolBuffer<float> scales_;
  PoolBuffer<int32_t> sums_;
};

// The arguments for blocks [begin, end) of a matrix; inputs and rows are left to the caller.
LinearArgs block_args(const MatrixView& matrix, int64_t begin, int64_t end, float* out);

// x [T, cols] times every matrix: out[i] is [T, rows of matrix i]. The input is quantised once for
// each distinct group. Throws Error(Numeric) as QuantisedRows::of.
void linears(ThreadPool& pool, const float* x, int32_t num_rows,
             std::span<const MatrixView> matrices, std::span<float* const> out, const char* op);

}  // namespace headrace
