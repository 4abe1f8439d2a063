#include "kernels/linear.h"

#include <algorithm>
#include <atomic>
#include <string>
#include <vector>

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

void QuantisedRows::bind(LinearArgs& args) const {
  args.codes = codes_.get();
  args.scales = scales_.get();
  args.sums = sums_.get();
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

namespace {

// One matrix of a call and its part of the tasks.
struct Share {
  const MatrixView* matrix;
  const QuantisedRows* input;  // null for a floating format
  float* out;
  int64_t first_task, num_ranges;
};

// A task should be worth a wake-up, about 32 KiB of weights, and a thread that loses its core
// should not hold up the others for long: a few tasks per thread.
int64_t ranges_of(const MatrixView& matrix, int32_t num_threads) {
  if (num_threads == 1) return 1;
  const int64_t worth = (matrix.nbytes() + 32767) / 32768;
  const int64_t most = (matrix.num_blocks() + 3) / 4;  // float kernels take four blocks at once
  return std::max<int64_t>(1, std::min({worth, most, int64_t{num_threads} * 4}));
}

}  // namespace

void linears(ThreadPool& pool, const float* x, int32_t num_rows,
             std::span<const MatrixView> matrices, std::span<float* const> out, const char* op) {
  std::vector<QuantisedRows> inputs;  // one per distinct group
  inputs.reserve(matrices.size());
  std::vector<Share> shares;
  int64_t num_tasks = 0;
  for (size_t i = 0; i < matrices.size(); ++i) {
    const MatrixView& matrix = matrices[i];
    const QuantisedRows* input = nullptr;
    if (is_quantised(matrix.format)) {
      for (const QuantisedRows& known : inputs) {
        if (known.group() == matrix.group) input = &known;
      }
      if (input == nullptr) {
        input = &inputs.emplace_back(
            QuantisedRows::of(pool, x, num_rows, matrix.cols, matrix.group, op));
      }
    }
    shares.push_back({&matrix, input, out[i], num_tasks, ranges_of(matrix, pool.num_threads())});
    num_tasks += shares.back().num_ranges;
  }
  // One job for all matrices: a wake-up and a wait each would cost a small model more than its
  // work.
  const KernelTable& table = kernels();
  pool.run(num_tasks, [&](int64_t task) {
    size_t i = shares.size() - 1;
    while (shares[i].first_task > task) --i;
    const Share& share = shares[i];
    const int64_t range = task - share.first_task;
    const int64_t blocks = share.matrix->num_blocks();
    LinearArgs args = block_args(*share.matrix, blocks * range / share.num_ranges,
                                 blocks * (range + 1) / share.num_ranges, share.out);
    args.x = x;
    args.num_rows = num_rows;
    if (share.input != nullptr) share.input->bind(args);
    table.linear[static_cast<int>(share.matrix->format)](args);
  });
}

}  // namespace headrace
