#include "kernels/linear.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <optional>
#include <string>

#include "base/error.h"

namespace headrace {

QuantisedRows::QuantisedRows(int32_t num_rows, int32_t cols, int32_t group)
    : cols_(cols),
      group_(group),
      groups_(static_cast<int32_t>(num_groups(cols, group))),
      codes_(int64_t{num_rows} * groups_ * group),
      scales_(int64_t{num_rows} * groups_),
      sums_(int64_t{num_rows} * groups_) {}

bool QuantisedRows::quantise(const KernelTable& table, const float* x, int32_t row) {
  const int64_t from = int64_t{row} * groups_;
  return table.quantise_row(x, cols_, group_, codes_.get() + from * group_, scales_.get() + from,
                            sums_.get() + from);
}

QuantisedRows QuantisedRows::of(ThreadPool& pool, const float* x, int32_t num_rows, int32_t cols,
                                int32_t group, const char* op) {
  QuantisedRows rows(num_rows, cols, group);
  const KernelTable& table = kernels();
  std::atomic<int32_t> first_bad{INT32_MAX};
  pool.run_ranges(num_rows, 4, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      if (rows.quantise(table, x + row * cols, static_cast<int32_t>(row))) continue;
      int32_t seen = first_bad.load();
      while (row < seen && !first_bad.compare_exchange_weak(seen, static_cast<int32_t>(row))) {
      }
    }
  });
  if (first_bad.load() != INT32_MAX) {
    throw Error(ErrorKind::Numeric, std::string(op) + ": NaN or infinity in row " +
                                        std::to_string(first_bad.load()) + " of the input");
  }
  return rows;
}

void QuantisedRows::bind(LinearArgs& args, int64_t first_row) const {
  args.codes = codes_.get() + first_row * groups_ * group_;
  args.scales = scales_.get() + first_row * groups_;
  args.sums = sums_.get() + first_row * groups_;
}

LinearArgs block_args(const MatrixView& matrix, int64_t begin, int64_t end, float* out) {
  LinearArgs args{};
  args.block_bytes = matrix.block_bytes();
  args.weights = matrix.data + begin * args.block_bytes;
  args.num_blocks = static_cast<int32_t>(end - begin);
  const int64_t last = end * kBlockOutputs < matrix.rows ? end * kBlockOutputs : matrix.rows;
  args.num_outputs = static_cast<int32_t>(last - begin * kBlockOutputs);
  args.cols = matrix.cols;
  args.group = matrix.group;
  args.num_groups = static_cast<int32_t>(matrix.num_groups());
  args.out = out + begin * kBlockOutputs;
  args.out_stride = matrix.rows;
  return args;
}

int64_t blocks_per_item(const MatrixView& matrix, int32_t num_rows, int32_t num_threads) {
  const int64_t blocks = matrix.num_blocks();
  if (num_threads == 1) return blocks;
  if (num_rows <= kFewRows) {
    return std::clamp<int64_t>(kItemBytes / matrix.block_bytes(), 1, blocks);
  }
  const int64_t least = is_quantised(matrix.format) ? kPackedBlocks : kFloatBlocks;
  const int64_t items = std::clamp<int64_t>(blocks / least, 1, num_threads * kItemsPerThread);
  return (blocks + items - 1) / items;
}

namespace {

// One matrix of a call and its part of the items.
struct Share {
  const MatrixView* matrix;
  const QuantisedRows* input;  // null for a floating format
  float* out;
  int64_t first_item, blocks;  // of each item, the last may have fewer
};

class Linears {
 public:
  Linears(const float* x, int32_t num_rows, int32_t num_threads)
      : x_(x), num_rows_(num_rows), num_threads_(num_threads) {}

  void add(const MatrixView& matrix, const QuantisedRows* input, float* out) {
    const int64_t blocks = blocks_per_item(matrix, num_rows_, num_threads_);
    shares_[count_++] = {&matrix, input, out, num_items_, blocks};
    num_items_ += (matrix.num_blocks() + blocks - 1) / blocks;
  }

  int64_t num_items() const { return num_items_; }

  // Items [first, last), by one kernel call for each matrix that they touch: a call per item costs
  // one row of q4 several percent of the read (docs/experiments.md, 2026-12-02).
  void compute(int64_t first, int64_t last) const {
    for (int32_t i = 0; i < count_; ++i) {
      const int64_t begin = std::max(first, shares_[i].first_item);
      const int64_t end = std::min(last, end_item(i));
      if (begin < end) multiply(shares_[i], begin, end);
    }
  }

 private:
  int64_t end_item(int32_t i) const {
    return i + 1 < count_ ? shares_[i + 1].first_item : num_items_;
  }

  void multiply(const Share& share, int64_t first, int64_t last) const {
    const int64_t begin = (first - share.first_item) * share.blocks;
    const int64_t end =
        std::min((last - share.first_item) * share.blocks, share.matrix->num_blocks());
    LinearArgs args = block_args(*share.matrix, begin, end, share.out);
    args.x = x_;
    args.num_rows = num_rows_;
    if (share.input != nullptr) share.input->bind(args);
    kernels().linear[static_cast<int>(share.matrix->format)](args);
  }

  const float* x_;
  int32_t num_rows_, num_threads_;
  std::array<Share, kMaxLinears> shares_;
  int32_t count_ = 0;
  int64_t num_items_ = 0;
};

// The inputs of a call: one for each distinct group.
class Inputs {
 public:
  const QuantisedRows* of(ThreadPool& pool, const float* x, int32_t num_rows,
                          const MatrixView& matrix, const char* op) {
    if (!is_quantised(matrix.format)) return nullptr;
    for (std::optional<QuantisedRows>& known : known_) {
      if (!known)
        known.emplace(QuantisedRows::of(pool, x, num_rows, matrix.cols, matrix.group, op));
      if (known->group() == matrix.group) return &*known;
    }
    return nullptr;  // not reached: there are as many places as matrices
  }

 private:
  std::array<std::optional<QuantisedRows>, kMaxLinears> known_;
};

}  // namespace

void linears(ThreadPool& pool, const float* x, int32_t num_rows,
             std::span<const MatrixView> matrices, std::span<float* const> out, const char* op) {
  if (matrices.size() > kMaxLinears) {
    throw Error(ErrorKind::Shape, std::string(op) + ": more than " + std::to_string(kMaxLinears) +
                                      " matrices in one call");
  }
  Inputs inputs;
  Linears work(x, num_rows, pool.num_threads());
  for (size_t i = 0; i < matrices.size(); ++i) {
    work.add(matrices[i], inputs.of(pool, x, num_rows, matrices[i], op), out[i]);
  }
  // One job for all matrices: a wake-up and a wait each would cost a small model more than its
  // work.
  pool.run_spans(work.num_items(), [&](int64_t begin, int64_t end) { work.compute(begin, end); });
}

}  // namespace headrace
