#include "kernels/moe.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>

#include "base/array_pool.h"
#include "base/error.h"
#include "kernels/linear.h"

namespace headrace {
namespace {

// Rows computed together: enough to share among threads, few enough that the work buffers stay in
// cache and records are given back soon.
constexpr int32_t kMaxBatchRows = 512;
// Of a row of the result in one item of the sum.
constexpr int32_t kSumColumns = 512;

[[noreturn]] void throw_not_finite(const char* op, const char* where) {
  throw Error(ErrorKind::Numeric, std::string(op) + ": NaN or infinity in " + where);
}

// ---- which tokens go to which expert

class Routing {
 public:
  Routing(const RoutedTokens& tokens, std::span<const int32_t> experts)
      : num_chosen_(tokens.num_chosen),
        num_experts_(static_cast<int32_t>(experts.size())),
        num_rows_(int64_t{tokens.num_tokens} * tokens.num_chosen),
        first_(num_experts_ + 2),
        tokens_(num_rows_),
        places_(num_rows_) {
    // Counted two places up, so that while rows are placed first_[i + 1] walks from i's first row
    // to its end.
    std::fill_n(first_.get(), num_experts_ + 2, 0);
    PoolBuffer<int32_t> index_of(num_rows_);
    for (int64_t i = 0; i < num_rows_; ++i) {
      index_of[i] = find(tokens, experts, i);
      ++first_[index_of[i] + 2];
    }
    for (int32_t i = 2; i < num_experts_ + 2; ++i) first_[i] += first_[i - 1];
    for (int64_t i = 0; i < num_rows_; ++i) {
      const int32_t at = first_[index_of[i] + 1]++;
      tokens_[at] = static_cast<int32_t>(i / num_chosen_);
      places_[at] = static_cast<int32_t>(i);
    }
  }

  int64_t num_rows() const { return num_rows_; }
  int32_t rows_of(int32_t expert) const { return first_[expert + 1] - first_[expert]; }
  const int32_t* tokens_of(int32_t expert) const { return tokens_.get() + first_[expert]; }
  // t * A + a of the same rows.
  const int32_t* places_of(int32_t expert) const { return places_.get() + first_[expert]; }

  // Of any batch: one expert's rows are never split.
  int64_t most_batch_rows() const {
    int32_t most = kMaxBatchRows;
    for (int32_t i = 0; i < num_experts_; ++i) most = std::max(most, rows_of(i));
    return std::min<int64_t>(most, num_rows_);
  }

 private:
  int32_t find(const RoutedTokens& tokens, std::span<const int32_t> experts, int64_t i) const {
    const int32_t id = tokens.ids[i];
    const auto found = std::lower_bound(experts.begin(), experts.end(), id);
    if (found != experts.end() && *found == id) {
      return static_cast<int32_t>(found - experts.begin());
    }
    throw Error(ErrorKind::Shape, "moe_ffn: expert " + std::to_string(id) + " of token " +
                                      std::to_string(i / num_chosen_) + " is not in the lease");
  }

  int32_t num_chosen_, num_experts_;
  int64_t num_rows_;
  PoolBuffer<int32_t> first_;            // [experts + 2], see the constructor
  PoolBuffer<int32_t> tokens_, places_;  // by expert, ascending
};

// ---- a gated network as items of work

// The three matrices of a network, its rows, and where they come from and go.
struct Network {
  MatrixView gate, up, down;
  int32_t num_rows;
  const int32_t* in_rows;   // null: 0, 1, 2, ...
  const int32_t* out_rows;  // null: 0, 1, 2, ...
  int64_t first_row;        // in the work buffers
};

// What all networks of a call read and write.
struct Buffers {
  Buffers(ThreadPool& pool, const float* input, int32_t num_inputs, int64_t most_rows,
          const Network& sample, float* results, const char* op)
      : x(input),
        out(results),
        gate(most_rows * sample.gate.rows),
        up(most_rows * sample.gate.rows) {
    const auto quantised = [&](const MatrixView& matrix) {
      return QuantisedRows::of(pool, input, num_inputs, matrix.cols, matrix.group, op);
    };
    if (is_quantised(sample.gate.format)) for_gate.emplace(quantised(sample.gate));
    const bool is_shared = for_gate && for_gate->group() == sample.up.group;
    if (is_quantised(sample.up.format) && !is_shared) for_up.emplace(quantised(sample.up));
    if (is_quantised(sample.down.format)) {
      hidden.emplace(static_cast<int32_t>(most_rows), sample.down.cols, sample.down.group);
    }
  }

  const QuantisedRows& input_of_up() const { return for_up ? *for_up : *for_gate; }

  const float* x;
  float* out;
  PoolBuffer<float> gate, up;  // [rows, F]; gate becomes silu(gate) * up
  std::optional<QuantisedRows> for_gate, for_up, hidden;
  std::atomic<bool> is_bad{false};  // an activation was NaN or infinite
  FirstException failure;           // of any item
};

// One network on its way: blocks of gate and up, then rows to quantise, then blocks of down.
// Whoever finishes the last item of a stage opens the next, so threads come and go as they like and
// wait for nothing but items that others hold.
class Flow {
 public:
  static constexpr int32_t kNumStages = 3;

  // parts: kNumStages * num_threads of them.
  Flow(const Network& network, Buffers& buffers, int32_t num_threads, Shares::Part* parts)
      : network_(network),
        buffers_(buffers),
        gate_blocks_(blocks_per_item(network.gate, network.num_rows, num_threads)),
        down_blocks_(blocks_per_item(network.down, network.num_rows, num_threads)) {
    const int64_t items[kNumStages] = {
        items_of(network.gate, gate_blocks_),
        buffers.hidden ? (network.num_rows + kQuantiseRows - 1) / kQuantiseRows : 0,
        items_of(network.down, down_blocks_)};
    for (int32_t s = 0; s < kNumStages; ++s) {
      stages_[s].shares = Shares(parts + s * num_threads, num_threads);
      stages_[s].num_items = items[s];
      stages_[s].left.store(items[s]);
    }
  }

  // `owner` takes the items in order, others from what it has left.
  void begin_alone(int32_t owner) {
    for (Stage& stage : stages_) stage.shares.deal_to(owner, stage.num_items);
    current_.store(0);
  }
  void begin_together() {
    for (Stage& stage : stages_) stage.shares.deal(stage.num_items);
    current_.store(0);
  }

  bool is_done() const { return current_.load() == kNumStages; }

  // Computes items until none can be taken. True if that finished a stage: news for whoever waits.
  bool advance(int32_t thread) {
    bool has_finished = false;
    for (int32_t s = current_.load(); s >= 0 && s < kNumStages; s = current_.load()) {
      Stage& stage = stages_[s];
      Shares::Items items = stage.shares.take(thread);
      if (items.begin == items.end && current_.load() == s) break;  // others hold the rest
      for (; items.begin < items.end; items = stage.shares.take(thread)) {
        // What fails counts as finished: others wait for it.
        buffers_.failure.guard([&] { compute(s, items); });
        const int64_t count = items.end - items.begin;
        if (stage.left.fetch_sub(count) > count) continue;
        current_.store(s == 0 && stages_[1].num_items == 0 ? 2 : s + 1);
        has_finished = true;
      }
    }
    return has_finished;
  }

 private:
  static constexpr int32_t kQuantiseRows = 4;  // in an item

  struct Stage {
    Shares shares;
    int64_t num_items = 0;
    std::atomic<int64_t> left{0};  // items that are not finished
  };

  static int64_t items_of(const MatrixView& matrix, int64_t blocks) {
    return (matrix.num_blocks() + blocks - 1) / blocks;
  }

  void compute(int32_t stage, Shares::Items items) {
    if (stage == 0) {
      gate_and_up(items);
    } else if (stage == 1) {
      quantise_hidden(items);
    } else {
      down(items);
    }
  }

  void gate_and_up(Shares::Items items) {
    const int64_t inner = network_.gate.rows;
    const int64_t begin = items.begin * gate_blocks_;
    const int64_t end = std::min(items.end * gate_blocks_, network_.gate.num_blocks());
    float* gate = buffers_.gate.get() + network_.first_row * inner;
    float* up = buffers_.up.get() + network_.first_row * inner;
    LinearArgs args = block_args(network_.gate, begin, end, gate);
    if (buffers_.for_gate) buffers_.for_gate->bind(args);
    multiply_inputs(network_.gate, args);
    args = block_args(network_.up, begin, end, up);
    if (is_quantised(network_.up.format)) buffers_.input_of_up().bind(args);
    multiply_inputs(network_.up, args);
    const int64_t from = begin * kBlockOutputs;
    const int64_t count = std::min<int64_t>(end * kBlockOutputs, inner) - from;
    for (int32_t row = 0; row < network_.num_rows; ++row) {
      float* g = gate + row * inner + from;
      kernels().silu_mul(g, up + row * inner + from, count, g);
    }
  }

  void multiply_inputs(const MatrixView& matrix, LinearArgs& args) const {
    args.x = buffers_.x;
    args.num_rows = network_.num_rows;
    args.in_rows = network_.in_rows;
    kernels().linear[static_cast<int>(matrix.format)](args);
  }

  void quantise_hidden(Shares::Items items) {
    const int64_t end = std::min<int64_t>(items.end * kQuantiseRows, network_.num_rows);
    for (int64_t i = items.begin * kQuantiseRows; i < end; ++i) {
      const int64_t row = network_.first_row + i;
      const float* x = buffers_.gate.get() + row * network_.down.cols;
      if (!buffers_.hidden->quantise(kernels(), x, static_cast<int32_t>(row))) {
        buffers_.is_bad.store(true);
      }
    }
  }

  void down(Shares::Items items) const {
    const int64_t begin = items.begin * down_blocks_;
    const int64_t end = std::min(items.end * down_blocks_, network_.down.num_blocks());
    LinearArgs args = block_args(network_.down, begin, end, buffers_.out);
    args.x = buffers_.gate.get() + network_.first_row * network_.down.cols;
    if (buffers_.hidden) buffers_.hidden->bind(args, network_.first_row);
    args.num_rows = network_.num_rows;
    args.out_rows = network_.out_rows;
    kernels().linear[static_cast<int>(network_.down.format)](args);
  }

  Network network_;
  Buffers& buffers_;
  int64_t gate_blocks_, down_blocks_;  // of an item
  Stage stages_[kNumStages];
  std::atomic<int32_t> current_{-1};  // stage; -1: not begun
};

// Flows that threads carry through together.
class Flows {
 public:
  Flows(ThreadPool& pool, int64_t most)
      : pool_(pool),
        num_threads_(pool.num_threads()),
        flows_(most),
        parts_((most * Flow::kNumStages + 1) * num_threads_),
        owners_(parts_.get(), num_threads_) {
    std::uninitialized_value_construct_n(parts_.get(), parts_.count());
  }

  void clear() { count_ = 0; }
  void add(const Network& network, Buffers& buffers) {
    Shares::Part* parts = parts_.get() + (count_ * Flow::kNumStages + 1) * num_threads_;
    std::construct_at(&flows_[count_++], network, buffers, num_threads_, parts);
  }

  // Each thread carries networks of its own, in order, then helps the others; `after(thread)`
  // follows on every thread once all are done.
  template <class After>
  void run(After&& after) {
    owners_.deal(count_);
    pool_.together([&](int32_t thread) {
      for (auto own = owners_.take(thread); own.begin < own.end; own = owners_.take(thread)) {
        for (int64_t i = own.begin; i < own.end; ++i) {
          flows_[i].begin_alone(thread);
          announce();
          advance(flows_[i], thread);
        }
      }
      help(thread);
      after(thread);
    });
  }

  // All threads share every network from the start.
  void run_together() {
    for (int64_t i = 0; i < count_; ++i) flows_[i].begin_together();
    pool_.together([&](int32_t thread) { help(thread); });
  }

 private:
  void help(int32_t thread) {
    for (;;) {
      const uint32_t seen = news_.load();
      bool is_done = true;
      for (int64_t i = 0; i < count_; ++i) {
        Flow& flow = flows_[(i + thread) % count_];
        if (flow.is_done()) continue;
        advance(flow, thread);
        is_done = is_done && flow.is_done();
      }
      if (is_done) return;
      wait_for_change(news_, seen);
    }
  }

  void advance(Flow& flow, int32_t thread) {
    if (flow.advance(thread)) announce();
  }

  void announce() {
    news_.fetch_add(1);
    news_.notify_all();
  }

  ThreadPool& pool_;
  int32_t num_threads_;
  PoolBuffer<Flow> flows_;
  PoolBuffer<Shares::Part> parts_;
  Shares owners_;  // of flows
  int64_t count_ = 0;
  std::atomic<uint32_t> news_{0};
};

static_assert(std::is_trivially_destructible_v<Flow>);

// ---- the sum

// The places of a token's experts in ascending id.
void sort_places(const int32_t* ids, int32_t num_chosen, int32_t* order) {
  for (int32_t a = 0; a < num_chosen; ++a) order[a] = a;
  std::sort(order, order + num_chosen,
            [&](int32_t a, int32_t b) { return ids[a] != ids[b] ? ids[a] < ids[b] : a < b; });
}

class MixtureSum {
 public:
  MixtureSum(const RoutedTokens& tokens, const float* results, float* out)
      : tokens_(tokens),
        results_(results),
        out_(out),
        order_(int64_t{tokens.num_tokens} * tokens.num_chosen),
        parts_((tokens.hidden + kSumColumns - 1) / kSumColumns),
        num_items_(parts_ * tokens.num_tokens) {
    for (int64_t t = 0; t < tokens.num_tokens; ++t) {
      const int64_t from = t * tokens.num_chosen;
      sort_places(tokens.ids + from, tokens.num_chosen, order_.get() + from);
    }
  }

  // On as many threads as come.
  void run() {
    for (int64_t item; (item = next_.fetch_add(1)) < num_items_;) {
      add_up(item / parts_, item % parts_ * kSumColumns);
    }
  }

 private:
  void add_up(int64_t t, int64_t column) const {
    const int64_t count = std::min<int64_t>(kSumColumns, tokens_.hidden - column);
    float* row = out_ + t * tokens_.hidden + column;
    std::fill_n(row, count, 0.0f);
    for (int32_t a = 0; a < tokens_.num_chosen; ++a) {
      const int64_t place = t * tokens_.num_chosen + order_[t * tokens_.num_chosen + a];
      kernels().fma_row(tokens_.weights[place], results_ + place * tokens_.hidden + column, count,
                        row);
    }
  }

  const RoutedTokens& tokens_;
  const float* results_;
  float* out_;
  PoolBuffer<int32_t> order_;
  int64_t parts_, num_items_;
  std::atomic<int64_t> next_{0};
};

// ---- the mixture

class Mixture {
 public:
  Mixture(ThreadPool& pool, const RoutedTokens& tokens, RecordFeed& feed, float* out)
      : feed_(feed),
        routing_(tokens, feed.expert_ids()),
        results_(routing_.num_rows() * tokens.hidden),
        buffers_(pool, tokens.x, tokens.num_tokens, routing_.most_batch_rows(),
                 network(0, nullptr, 0), results_.get(), "moe_ffn"),
        flows_(pool, static_cast<int64_t>(feed.expert_ids().size())),
        sum_(tokens, results_.get(), out),
        activations_(tokens.activations) {}

  void run() {
    const int64_t num_experts = static_cast<int64_t>(feed_.expert_ids().size());
    PoolBuffer<int32_t> ready(num_experts);
    int64_t num_seen = 0;
    while (num_seen < num_experts) {
      const int32_t count = feed_.next_ready({ready.get(), static_cast<size_t>(num_experts)});
      if (count == 0) {
        throw Error(ErrorKind::Shape,
                    "moe_ffn: the feed was used before: " + std::to_string(num_experts - num_seen) +
                        " of " + std::to_string(num_experts) + " records never came");
      }
      num_seen += count;
      compute({ready.get(), static_cast<size_t>(count)}, num_seen == num_experts);
    }
    if (num_experts == 0) sum_.run();
  }

 private:
  Network network(int32_t expert, const std::byte* record, int64_t first_row) const {
    const ExpertLayout& layout = feed_.layout();
    return {MatrixView::of(layout.gate, record),
            MatrixView::of(layout.up, record),
            MatrixView::of(layout.down, record),
            routing_.rows_of(expert),
            routing_.tokens_of(expert),
            routing_.places_of(expert),
            first_row};
  }

  // In batches whose rows fit the work buffers: kMaxBatchRows, or one expert's if more.
  void compute(std::span<const int32_t> ready, bool is_last) {
    while (!ready.empty()) {
      flows_.clear();
      size_t count = 0;
      int64_t rows = 0;
      for (; count < ready.size(); ++count) {
        const int32_t expert = ready[count];
        if (count > 0 && rows + routing_.rows_of(expert) > kMaxBatchRows) break;
        flows_.add(network(expert, feed_.data(expert), rows), buffers_);
        rows += routing_.rows_of(expert);
      }
      const bool is_end = is_last && count == ready.size();
      flows_.run([&](int32_t) {
        if (is_end) sum_.run();
      });
      buffers_.failure.rethrow();
      if (buffers_.is_bad.load()) throw_not_finite("moe_ffn", "the activation of an expert");
      if (activations_ != nullptr) copy_activations(ready.first(count));
      for (int32_t expert : ready.first(count)) feed_.done(expert);
      ready = ready.subspan(count);
    }
  }

  // Of the batch just computed: what down was given.
  void copy_activations(std::span<const int32_t> experts) const {
    const int64_t inner = feed_.layout().down.cols;
    const float* row = buffers_.gate.get();
    for (const int32_t expert : experts) {
      for (int32_t i = 0; i < routing_.rows_of(expert); ++i, row += inner) {
        std::copy_n(row, inner, activations_ + routing_.places_of(expert)[i] * inner);
      }
    }
  }

  RecordFeed& feed_;
  Routing routing_;
  PoolBuffer<float> results_;  // [T * A, D], row t * A + a
  Buffers buffers_;
  Flows flows_;
  MixtureSum sum_;
  float* activations_;
};

// ---- what comes after

void advise(ThreadPool& pool, const NextRouter& next, int32_t num_tokens, RecordSource& source) {
  const int64_t width = next.router.weight.cols;
  const int64_t count = int64_t{num_tokens} * next.router.num_chosen;
  PoolBuffer<float> normed(num_tokens * width);
  PoolBuffer<int32_t> ids(count);
  PoolBuffer<float> weights(count);
  pool.run_ranges(num_tokens, 8, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      kernels().rms_norm_row(next.hidden + t * width, next.norm, next.eps,
                             static_cast<int32_t>(width), normed.get() + t * width);
    }
  });
  try {
    route(pool, normed.get(), num_tokens, next.router, ids.get(), weights.get());
  } catch (const Error& error) {
    if (error.kind() != ErrorKind::Numeric) throw;
    return;  // no number in a guess; the layer itself will say so if there is none in its input
  }
  source.look_ahead(next.layer, {ids.get(), static_cast<size_t>(count)}, num_tokens);
}

}  // namespace

void swiglu_ffn(ThreadPool& pool, const float* x, int32_t num_rows, const MatrixView& gate,
                const MatrixView& up, const MatrixView& down, float* out) {
  const Network network{gate, up, down, num_rows, nullptr, nullptr, 0};
  Buffers buffers(pool, x, num_rows, num_rows, network, out, "swiglu_ffn");
  Flows flows(pool, 1);
  flows.add(network, buffers);
  flows.run_together();
  buffers.failure.rethrow();
  if (buffers.is_bad.load()) throw_not_finite("swiglu_ffn", "the activation");
}

void moe_ffn(ThreadPool& pool, const RoutedTokens& tokens, RecordFeed& feed, float* out) {
  Mixture(pool, tokens, feed, out).run();
}

void routed_ffn(ThreadPool& pool, const float* x, int32_t num_tokens, const Router& router,
                RecordSource& source, int32_t layer, const NextRouter* next, float* out) {
  const int64_t count = int64_t{num_tokens} * router.num_chosen;
  PoolBuffer<int32_t> ids(count);
  PoolBuffer<float> weights(count);
  route(pool, x, num_tokens, router, ids.get(), weights.get());
  const std::unique_ptr<RecordFeed> feed =
      source.feed(layer, {ids.get(), static_cast<size_t>(count)}, num_tokens);
  if (next != nullptr && source.wants_advice()) advise(pool, *next, num_tokens, source);
  const RoutedTokens tokens{x,          ids.get(),          weights.get(),
                            num_tokens, router.weight.cols, router.num_chosen};
  moe_ffn(pool, tokens, *feed, out);
}

}  // namespace headrace
