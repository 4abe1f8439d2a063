#include "kernels/moe.h"

#include <algorithm>
#include <atomic>
#include <numeric>
#include <optional>
#include <string>
#include <vector>

#include "base/array_pool.h"
#include "base/error.h"
#include "kernels/linear.h"

namespace headrace {
namespace {

// Rows computed together: enough to share among threads, few enough that the work buffers stay in
// cache and records are given back soon.
constexpr int32_t kMaxBatchRows = 512;

[[noreturn]] void throw_not_finite(const char* op, const char* where) {
  throw Error(ErrorKind::Numeric, std::string(op) + ": NaN or infinity in " + where);
}

// ---- which tokens go to which expert

struct Routing {
  std::vector<int32_t> first;   // [experts + 1] into the two below
  std::vector<int32_t> tokens;  // token of each routed row, by expert, ascending
  std::vector<int32_t> places;  // t * A + a of the same rows

  int32_t rows_of(int32_t index) const { return first[index + 1] - first[index]; }
};

Routing route(const RoutedTokens& tokens, std::span<const int32_t> experts) {
  const int64_t count = int64_t{tokens.num_tokens} * tokens.num_chosen;
  std::vector<int32_t> index_of(count);
  Routing routing;
  routing.first.assign(experts.size() + 1, 0);
  for (int64_t i = 0; i < count; ++i) {
    const auto found = std::lower_bound(experts.begin(), experts.end(), tokens.ids[i]);
    if (found == experts.end() || *found != tokens.ids[i]) {
      throw Error(ErrorKind::Shape, "moe_ffn: expert " + std::to_string(tokens.ids[i]) +
                                        " of token " + std::to_string(i / tokens.num_chosen) +
                                        " is not in the lease");
    }
    index_of[i] = static_cast<int32_t>(found - experts.begin());
    ++routing.first[index_of[i] + 1];
  }
  std::partial_sum(routing.first.begin(), routing.first.end(), routing.first.begin());
  routing.tokens.resize(count);
  routing.places.resize(count);
  std::vector<int32_t> next(routing.first.begin(), routing.first.end() - 1);
  for (int64_t i = 0; i < count; ++i) {
    const int32_t at = next[index_of[i]]++;
    routing.tokens[at] = static_cast<int32_t>(i / tokens.num_chosen);
    routing.places[at] = static_cast<int32_t>(i);
  }
  return routing;
}

// ---- some experts, three phases: gate and up with the activation, its quantisation, down

struct Batch {
  std::vector<int32_t> experts;    // indices into the feed
  std::vector<int32_t> first_row;  // of each expert in the batch's work buffers
  int32_t num_rows = 0;
};

class ExpertPass {
 public:
  ExpertPass(ThreadPool& pool, const RoutedTokens& tokens, const Routing& routing,
             const ExpertLayout& layout)
      : pool_(pool),
        table_(kernels()),
        tokens_(tokens),
        routing_(routing),
        layout_(layout),
        gate_(most_rows(routing) * layout.gate.rows),
        up_(most_rows(routing) * layout.gate.rows) {
    if (is_quantised(layout.down.format)) {
      hidden_.emplace(static_cast<int32_t>(most_rows(routing)), layout.down.cols,
                      layout.down.group);
    }
    if (is_quantised(layout.gate.format)) {
      for_gate_.emplace(QuantisedRows::of(pool, tokens.x, tokens.num_tokens, tokens.hidden,
                                          layout.gate.group, "moe_ffn"));
    }
    if (is_quantised(layout.up.format) && layout.up.group != group_for_gate()) {
      for_up_.emplace(QuantisedRows::of(pool, tokens.x, tokens.num_tokens, tokens.hidden,
                                        layout.up.group, "moe_ffn"));
    }
  }

  // results: [T * A, D], row t * A + a.
  void compute(const Batch& batch, const RecordFeed& feed, float* results) {
    gate_and_up(batch, feed);
    if (hidden_) quantise_hidden(batch);
    down(batch, feed, results);
  }

 private:
  // Of any batch: one expert's rows are never split.
  static int64_t most_rows(const Routing& routing) {
    int32_t most = kMaxBatchRows;
    for (size_t i = 0; i + 1 < routing.first.size(); ++i) {
      most = std::max(most, routing.rows_of(static_cast<int32_t>(i)));
    }
    return std::min<int64_t>(most, static_cast<int64_t>(routing.tokens.size()));
  }

  int32_t group_for_gate() const { return for_gate_ ? for_gate_->group() : 0; }

  // Tasks are (expert, range of blocks), so that two threads share one expert's rows evenly.
  template <class Task>
  void over_blocks(const Batch& batch, const ExpertMatrix& matrix, Task&& task) {
    const int64_t blocks = num_blocks(matrix.rows);
    const int64_t bytes = block_bytes(matrix.format, matrix.cols, matrix.group);
    const int64_t grain = std::clamp<int64_t>(kTaskBytes / std::max<int64_t>(bytes, 1), 1, blocks);
    const int64_t ranges = (blocks + grain - 1) / grain;
    pool_.run(ranges * static_cast<int64_t>(batch.experts.size()), [&](int64_t i) {
      const int64_t range = i % ranges;
      task(static_cast<int32_t>(i / ranges), blocks * range / ranges,
           blocks * (range + 1) / ranges);
    });
  }

  void gate_and_up(const Batch& batch, const RecordFeed& feed) {
    const int64_t inner = layout_.gate.rows;
    over_blocks(batch, layout_.gate, [&](int32_t i, int64_t begin, int64_t end) {
      const int32_t expert = batch.experts[i];
      const int64_t offset = batch.first_row[i] * inner;
      multiply(layout_.gate, feed.data(expert), expert, begin, end, for_gate_,
               gate_.get() + offset);
      multiply(layout_.up, feed.data(expert), expert, begin, end, for_up_ ? for_up_ : for_gate_,
               up_.get() + offset);
      const int64_t from = begin * kBlockOutputs;
      const int64_t count = std::min<int64_t>(end * kBlockOutputs, inner) - from;
      for (int32_t row = 0; row < routing_.rows_of(expert); ++row) {
        float* g = gate_.get() + offset + row * inner + from;
        table_.silu_mul(g, up_.get() + offset + row * inner + from, count, g);
      }
    });
  }

  void multiply(const ExpertMatrix& matrix, const std::byte* record, int32_t expert, int64_t begin,
                int64_t end, const std::optional<QuantisedRows>& input, float* out) const {
    LinearArgs args = block_args(MatrixView::of(matrix, record), begin, end, out);
    args.x = tokens_.x;
    if (is_quantised(matrix.format)) input->bind(args);
    args.num_rows = routing_.rows_of(expert);
    args.in_rows = routing_.tokens.data() + routing_.first[expert];
    table_.linear[static_cast<int>(matrix.format)](args);
  }

  void quantise_hidden(const Batch& batch) {
    std::atomic<bool> is_bad{false};
    pool_.run_ranges(batch.num_rows, 4, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const float* x = gate_.get() + row * layout_.down.cols;
        if (!hidden_->quantise(table_, x, static_cast<int32_t>(row))) is_bad.store(true);
      }
    });
    if (is_bad.load()) throw_not_finite("moe_ffn", "the activation of an expert");
  }

  void down(const Batch& batch, const RecordFeed& feed, float* results) {
    over_blocks(batch, layout_.down, [&](int32_t i, int64_t begin, int64_t end) {
      const int32_t expert = batch.experts[i];
      std::vector<int32_t>& rows = scratch_rows();
      rows.resize(static_cast<size_t>(routing_.rows_of(expert)));
      std::iota(rows.begin(), rows.end(), batch.first_row[i]);
      LinearArgs args =
          block_args(MatrixView::of(layout_.down, feed.data(expert)), begin, end, results);
      args.x = gate_.get();
      if (hidden_) hidden_->bind(args);
      args.num_rows = routing_.rows_of(expert);
      args.in_rows = rows.data();
      args.out_rows = routing_.places.data() + routing_.first[expert];
      table_.linear[static_cast<int>(layout_.down.format)](args);
    });
  }

  static std::vector<int32_t>& scratch_rows() {
    thread_local std::vector<int32_t> rows;
    return rows;
  }

  // Of one matrix, in one task. Every start of a stream costs a memory latency, and prefetching
  // past its end up to 2 KiB: 64 KiB gave 0.64-0.69 of the read bandwidth on two threads, 192 and
  // 384 KiB 0.73-0.76 (docs/experiments.md, 2026-12-02).
  static constexpr int64_t kTaskBytes = 196608;

  ThreadPool& pool_;
  const KernelTable& table_;
  const RoutedTokens& tokens_;
  const Routing& routing_;
  const ExpertLayout& layout_;
  std::optional<QuantisedRows> for_gate_, for_up_;
  PoolBuffer<float> gate_, up_;  // [rows of a batch, F]; gate_ becomes silu(gate) * up
  std::optional<QuantisedRows> hidden_;
};

// ---- the sum

void sum_token(const KernelTable& table, const RoutedTokens& tokens, int64_t t,
               const float* results, float* out) {
  const int32_t chosen = tokens.num_chosen;
  const int32_t* ids = tokens.ids + t * chosen;
  std::vector<int32_t> order(chosen);
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(),
            [&](int32_t a, int32_t b) { return ids[a] != ids[b] ? ids[a] < ids[b] : a < b; });
  float* row = out + t * tokens.hidden;
  std::fill_n(row, tokens.hidden, 0.0f);
  for (int32_t a : order) {
    table.fma_row(tokens.weights[t * chosen + a], results + (t * chosen + a) * tokens.hidden,
                  tokens.hidden, row);
  }
}

// Splits what is ready so that the work buffers hold kMaxBatchRows rows, or one expert's if more.
std::vector<Batch> batches(std::span<const int32_t> ready, const Routing& routing) {
  std::vector<Batch> result;
  for (int32_t index : ready) {
    const int32_t rows = routing.rows_of(index);
    if (result.empty() || result.back().num_rows + rows > kMaxBatchRows) result.emplace_back();
    Batch& batch = result.back();
    batch.experts.push_back(index);
    batch.first_row.push_back(batch.num_rows);
    batch.num_rows += rows;
  }
  return result;
}

}  // namespace

void swiglu_ffn(ThreadPool& pool, const float* x, int32_t num_rows, const MatrixView& gate,
                const MatrixView& up, const MatrixView& down, float* out) {
  const int64_t count = int64_t{num_rows} * gate.rows;
  PoolBuffer<float> gated(count);
  PoolBuffer<float> upped(count);
  const MatrixView both[2] = {gate, up};
  float* const outs[2] = {gated.get(), upped.get()};
  linears(pool, x, num_rows, both, outs, "swiglu_ffn");
  const KernelTable& table = kernels();
  pool.run_ranges(count, 4096, [&](int64_t begin, int64_t end) {
    table.silu_mul(gated.get() + begin, upped.get() + begin, end - begin, gated.get() + begin);
  });
  float* const result[1] = {out};
  linears(pool, gated.get(), num_rows, std::span(&down, 1), result, "swiglu_ffn");
}

void moe_ffn(ThreadPool& pool, const RoutedTokens& tokens, RecordFeed& feed, float* out) {
  const std::span<const int32_t> experts = feed.expert_ids();
  const Routing routing = route(tokens, experts);
  PoolBuffer<float> results(int64_t{tokens.num_tokens} * tokens.num_chosen * tokens.hidden);
  ExpertPass pass(pool, tokens, routing, feed.layout());
  std::vector<int32_t> ready(std::max<size_t>(experts.size(), 1));
  for (;;) {
    const int32_t count = feed.next_ready(ready);
    if (count == 0) break;
    for (const Batch& batch : batches(std::span(ready.data(), count), routing)) {
      pass.compute(batch, feed, results.get());
      for (int32_t index : batch.experts) feed.done(index);
    }
  }
  const KernelTable& table = kernels();
  pool.run_ranges(tokens.num_tokens, 1, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) sum_token(table, tokens, t, results.get(), out);
  });
}

}  // namespace headrace
