// Products with packed matrices, threaded over blocks of outputs.
#pragma once

#include <cstddef>
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
  // Makes `first_row` the row 0 of args.
  void bind(LinearArgs& args, int64_t first_row = 0) const;

 private:
  int32_t cols_, group_, groups_;
  PoolBuffer<int8_t> codes_;
  PoolBuffer<float> scales_;
  PoolBuffer<int32_t> sums_;
};

// The arguments for blocks [begin, end) of a matrix; inputs and rows are left to the caller.
LinearArgs block_args(const MatrixView& matrix, int64_t begin, int64_t end, float* out);

// Up to this many rows a product waits for memory, not for arithmetic.
inline constexpr int32_t kFewRows = 4;
// Of weights in an item of such a product: few, so that threads end together.
inline constexpr int64_t kItemBytes = 32768;
// Of larger products at most so many, each of at least so many blocks: every item packs its rows
// anew, which takes as long as half a block of a quantised format, and the kernels of floating ones
// compute four blocks together.
inline constexpr int64_t kItemsPerThread = 4;
inline constexpr int64_t kPackedBlocks = 24;
inline constexpr int64_t kFloatBlocks = 4;

// How many blocks of outputs make an item of work for threads.
int64_t blocks_per_item(const MatrixView& matrix, int32_t num_rows, int32_t num_threads);

inline constexpr size_t kMaxLinears = 8;

// x [T, cols] times every matrix, at most kMaxLinears: out[i] is [T, rows of matrix i]. The input
// is quantised once for each distinct group. Throws Error(Numeric) as QuantisedRows::of.
void linears(ThreadPool& pool, const float* x, int32_t num_rows,
             std::span<const MatrixView> matrices, std::span<float* const> out, const char* op);

}  // namespace headrace
