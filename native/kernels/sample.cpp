#include "kernels/sample.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <span>
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

// Probabilities are added as integers, so that no order of addition matters: 2^40 is the likeliest
// token's weight, and a vocabulary of 2^22 tokens cannot overflow. What rounds to zero is never
// drawn.
constexpr float kOne = 0x1p40f;

int64_t weight_of(const Candidate& c) { return static_cast<int64_t>(c.p * kOne); }

// In buffers of the pool: a fresh vector of a vocabulary's size would fault in its pages each time.
using Candidates = std::span<Candidate>;

// Moves what is kept to the front. Without a branch: which ones stay is as good as random.
template <class Predicate>
Candidates keep_if(Candidates candidates, Predicate is_kept) {
  size_t count = 0;
  for (const Candidate c : candidates) {
    candidates[count] = c;
    count += is_kept(c) ? 1 : 0;
  }
  return candidates.first(count);
}

int64_t sum_of(Candidates candidates) {
  int64_t sum = 0;
  for (const Candidate& c : candidates) sum += weight_of(c);
  return sum;
}

// Where a probability stands: by its exponent and seven bits more, so that all up to 1 fit a table.
size_t bucket_of(float p) { return std::bit_cast<uint32_t>(p) >> 16; }
const size_t kNumBuckets = bucket_of(1.0f) + 1;

// Keeps the smallest prefix in descending order that reaches top_p of the total. Sorts only the
// bucket in which that prefix ends.
Candidates keep_top_p(Candidates candidates, float top_p) {
  const int64_t total = sum_of(candidates);
  const int64_t wanted =
      static_cast<int64_t>(std::ceil(static_cast<double>(top_p) * static_cast<double>(total)));
  // What is below the mean of what may be left out cannot reach that sum together.
  const int64_t least = (total - wanted) / static_cast<int64_t>(candidates.size());
  candidates = keep_if(candidates, [&](const Candidate& c) { return weight_of(c) >= least; });
  std::vector<int64_t> sums(kNumBuckets, 0);
  for (const Candidate& c : candidates) sums[bucket_of(c.p)] += weight_of(c);
  int64_t sum = 0;
  size_t bucket = kNumBuckets - 1;
  while (bucket > 0 && sum + sums[bucket] < wanted) sum += sums[bucket--];

  PoolBuffer<Candidate> copy(static_cast<int64_t>(candidates.size()));
  std::copy(candidates.begin(), candidates.end(), copy.get());
  const Candidates border = keep_if({copy.get(), candidates.size()},
                                    [&](const Candidate& c) { return bucket_of(c.p) == bucket; });
  if (!std::is_sorted(border.begin(), border.end(), is_before)) {  // all equal: already by id
    std::sort(border.begin(), border.end(), is_before);
  }
  size_t end = 0;
  while (end < border.size() && sum < wanted) sum += weight_of(border[end++]);
  if (end == border.size()) {
    return keep_if(candidates, [&](const Candidate& c) { return bucket_of(c.p) >= bucket; });
  }
  const Candidate first_out = border[end];
  return keep_if(candidates, [&](const Candidate& c) { return is_before(c, first_out); });
}

// The k first in descending order, ascending by id. One pass: most of a vocabulary fails the
// comparison with the least of those kept.
Candidates top_k_of(const float* p, int32_t vocab, int32_t k, Candidate* place) {
  const Candidates kept{place, static_cast<size_t>(k)};
  for (int32_t i = 0; i < k; ++i) kept[static_cast<size_t>(i)] = {p[i], i};
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

Candidates all_of(const float* p, int32_t vocab, Candidate* place) {
  for (int32_t i = 0; i < vocab; ++i) place[i] = {p[i], i};
  return {place, static_cast<size_t>(vocab)};
}

int32_t draw(Candidates candidates, double u) {
  const int64_t target = static_cast<int64_t>(u * static_cast<double>(sum_of(candidates)));
  int64_t sum = 0;
  int32_t last = candidates.front().id;
  for (const Candidate& c : candidates) {
    const int64_t weight = weight_of(c);
    if (weight == 0) continue;
    sum += weight;
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
  PoolBuffer<Candidate> place(vocab);
  const bool is_cut = params.top_k > 0 && params.top_k < vocab;
  Candidates kept = is_cut ? top_k_of(p.get(), vocab, params.top_k, place.get())
                           : all_of(p.get(), vocab, place.get());
  if (params.min_p > 0.0f) {  // the most likely token has p = 1 exactly
    kept = keep_if(kept, [&](const Candidate& c) { return c.p >= params.min_p; });
  }
  if (params.top_p < 1.0f) kept = keep_top_p(kept, params.top_p);
  return draw(kept, uniform(params.seed, params.position));
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
