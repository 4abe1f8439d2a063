#include "kernels/sample.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/array_pool.h"
#include "base/error.h"
#include "kernels/kernel_table.h"
#include "kernels/rope.h"

namespace headrace {
namespace {

uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// The largest logit; throws unless it is finite and no logit is NaN.
float checked_maximum(const KernelTable& table, const float* logits, int32_t vocab) {
  if (!table.has_nan(logits, vocab)) {
    const float maximum = table.max_of(logits, vocab);
    if (std::isfinite(maximum)) return maximum;
    if (maximum < 0.0f) throw Error(ErrorKind::Numeric, "sample: every logit is -infinity");
  }
  const float* bad =
      std::find_if(logits, logits + vocab, [](float x) { return std::isnan(x) || x == INFINITY; });
  throw Error(ErrorKind::Numeric,
              "sample: NaN or infinity in the logits at token " + std::to_string(bad - logits));
}

struct Candidate {
  float p;
  int32_t id;
};

bool is_before(const Candidate& a, const Candidate& b) {
  return a.p != b.p ? a.p > b.p : a.id < b.id;
}

bool is_lower_id(const Candidate& a, const Candidate& b) { return a.id < b.id; }

double sum_of(const std::vector<Candidate>& candidates) {
  double sum = 0.0;
  for (const Candidate& c : candidates) sum += static_cast<double>(c.p);
  return sum;
}

// The smallest prefix in descending order that reaches `wanted`; empty if all together do not.
std::vector<Candidate> prefix_of(std::vector<Candidate> candidates, double wanted) {
  const auto is_after = [](const Candidate& a, const Candidate& b) { return is_before(b, a); };
  std::make_heap(candidates.begin(), candidates.end(), is_after);
  std::vector<Candidate> kept;
  double sum = 0.0;
  while (sum < wanted || kept.empty()) {
    if (candidates.empty()) return {};
    std::pop_heap(candidates.begin(), candidates.end(), is_after);
    kept.push_back(candidates.back());
    candidates.pop_back();
    sum += static_cast<double>(kept.back().p);
  }
  return kept;
}

// The smallest prefix in descending order that reaches top_p of the total, ascending by id.
// Candidates below the mean of what may be left out cannot reach that sum together, so the prefix
// lies among the others: a short list where the vocabulary is long.
std::vector<Candidate> top_p_of(const std::vector<Candidate>& candidates, float top_p) {
  const double total = sum_of(candidates);
  const double wanted = static_cast<double>(top_p) * total;
  const double least = (total - wanted) / static_cast<double>(candidates.size());
  std::vector<Candidate> likely;
  for (const Candidate& c : candidates) {
    if (static_cast<double>(c.p) >= least) likely.push_back(c);
  }
  std::vector<Candidate> kept = prefix_of(std::move(likely), wanted);
  if (kept.empty()) kept = prefix_of(candidates, wanted);  // a matter of rounding
  if (kept.empty()) kept = candidates;
  std::sort(kept.begin(), kept.end(), is_lower_id);
  return kept;
}

// The k first in descending order, ascending by id. One pass: most of a vocabulary fails the
// comparison with the least of those kept.
std::vector<Candidate> top_k_of(const float* p, int32_t vocab, int32_t k) {
  std::vector<Candidate> kept;
  kept.reserve(static_cast<size_t>(k));
  for (int32_t i = 0; i < k; ++i) kept.push_back({p[i], i});
  std::make_heap(kept.begin(), kept.end(), is_before);  // the last of the order in front
  for (int32_t i = k; i < vocab; ++i) {
    if (!(p[i] > kept.front().p)) continue;  // an equal one has a lower id
    std::pop_heap(kept.begin(), kept.end(), is_before);
    kept.back() = {p[i], i};
    std::push_heap(kept.begin(), kept.end(), is_before);
  }
  std::sort(kept.begin(), kept.end(), is_lower_id);
  return kept;
}

std::vector<Candidate> all_of(const float* p, int32_t vocab) {
  std::vector<Candidate> candidates(static_cast<size_t>(vocab));
  for (int32_t i = 0; i < vocab; ++i) candidates[static_cast<size_t>(i)] = {p[i], i};
  return candidates;
}

int32_t draw(const std::vector<Candidate>& candidates, double u) {
  const double target = u * sum_of(candidates);
  double sum = 0.0;
  int32_t last = candidates.front().id;
  for (const Candidate& c : candidates) {
    if (c.p == 0.0f) continue;
    sum += static_cast<double>(c.p);
    last = c.id;
    if (sum > target) break;
  }
  return last;
}

}  // namespace

double uniform(uint64_t seed, int64_t position) {
  const uint64_t bits = mix(mix(seed) + static_cast<uint64_t>(position) * 0xd1342543de82ef95u);
  return static_cast<double>(bits >> 11) * 0x1p-53;
}

int32_t sample(const float* logits, int32_t vocab, const SampleParams& params) {
  const KernelTable& table = kernels();
  const float maximum = checked_maximum(table, logits, vocab);
  if (params.temperature == 0.0f) {
    return static_cast<int32_t>(std::find(logits, logits + vocab, maximum) - logits);
  }
  PoolBuffer<float> p(vocab);
  table.exp_sum(logits, maximum, params.temperature, vocab, p.get());
  const bool is_cut = params.top_k > 0 && params.top_k < vocab;
  std::vector<Candidate> candidates =
      is_cut ? top_k_of(p.get(), vocab, params.top_k) : all_of(p.get(), vocab);
  if (params.min_p > 0.0f) {  // the most likely token has p = 1 exactly
    std::erase_if(candidates, [&](const Candidate& c) { return c.p < params.min_p; });
  }
  if (params.top_p < 1.0f) candidates = top_p_of(candidates, params.top_p);
  return draw(candidates, uniform(params.seed, params.position));
}

void log_softmax(ThreadPool& pool, const float* logits, int32_t num_rows, int32_t vocab,
                 float* out) {
  const KernelTable& table = kernels();
  pool.run_ranges(num_rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float* x = logits + row * vocab;
      float* y = out + row * vocab;
      const float maximum = table.max_of(x, vocab);
      const float sum = table.exp_sum(x, maximum, 1.0f, vocab, y);
      const float log_sum = static_cast<float>(log_of(static_cast<double>(sum)));
      for (int32_t i = 0; i < vocab; ++i) y[i] = (x[i] - maximum) - log_sum;
    }
  });
}

void apply_penalties(const float* logits, int32_t vocab, const Penalties& penalties, float* out) {
  std::memcpy(out, logits, static_cast<size_t>(vocab) * sizeof(float));
  for (int32_t i = 0; i < penalties.num_seen; ++i) {
    float& logit = out[penalties.ids[i]];
    logit = logit > 0.0f ? logit / penalties.repetition : logit * penalties.repetition;
    if (penalties.counts[i] == 0) continue;
    logit -= penalties.frequency * static_cast<float>(penalties.counts[i]);
    logit -= penalties.presence;
  }
}

}  // namespace headrace
