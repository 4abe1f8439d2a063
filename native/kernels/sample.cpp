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

void check_logits(const float* logits, int32_t vocab) {
  bool has_finite = false;
  for (int32_t i = 0; i < vocab; ++i) {
    if (std::isnan(logits[i]) || logits[i] == INFINITY) {
      throw Error(ErrorKind::Numeric,
                  "sample: NaN or infinity in the logits at token " + std::to_string(i));
    }
    has_finite = has_finite || std::isfinite(logits[i]);
  }
  if (!has_finite) throw Error(ErrorKind::Numeric, "sample: every logit is -infinity");
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

// The smallest prefix in descending order that reaches top_p of the total. A heap, because the
// prefix is short where the vocabulary is long.
void keep_top_p(std::vector<Candidate>& candidates, float top_p) {
  const double wanted = static_cast<double>(top_p) * sum_of(candidates);
  const auto is_after = [](const Candidate& a, const Candidate& b) { return is_before(b, a); };
  std::make_heap(candidates.begin(), candidates.end(), is_after);
  auto end = candidates.end();
  double sum = 0.0;
  do {
    std::pop_heap(candidates.begin(), end, is_after);
    --end;
    sum += static_cast<double>(end->p);
  } while (sum < wanted && end != candidates.begin());
  candidates.erase(candidates.begin(), end);
  std::sort(candidates.begin(), candidates.end(), is_lower_id);
}

void keep_top_k(std::vector<Candidate>& candidates, int32_t top_k) {
  const auto end = candidates.begin() + top_k;
  std::nth_element(candidates.begin(), end - 1, candidates.end(), is_before);
  candidates.erase(end, candidates.end());
  std::sort(candidates.begin(), candidates.end(), is_lower_id);
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
  check_logits(logits, vocab);
  const float* best = std::max_element(logits, logits + vocab);  // the first of equals
  if (params.temperature == 0.0f) return static_cast<int32_t>(best - logits);
  PoolBuffer<float> p(vocab);
  kernels().exp_sum(logits, *best, params.temperature, vocab, p.get());
  std::vector<Candidate> candidates(vocab);
  for (int32_t i = 0; i < vocab; ++i) candidates[i] = {p[i], i};
  if (params.top_k > 0 && params.top_k < vocab) keep_top_k(candidates, params.top_k);
  if (params.min_p > 0.0f) {  // the most likely token has p = 1 exactly
    std::erase_if(candidates, [&](const Candidate& c) { return c.p < params.min_p; });
  }
  if (params.top_p < 1.0f) keep_top_p(candidates, params.top_p);
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
