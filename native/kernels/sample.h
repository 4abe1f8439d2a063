// From logits to a token: penalties, log-probabilities, sampling. Everything in a fixed order, and
// the random number a function of (seed, position) alone, so that batching cannot change a token.
#pragma once

#include <cstdint>

#include "base/thread_pool.h"

namespace headrace {

struct SampleParams {
  float temperature = 1.0f;  // 0: the largest logit, ties to the lower id
  int32_t top_k = 0;         // 0: off
  float top_p = 1.0f;        // 1: off
  float min_p = 0.0f;        // 0: off
  uint64_t seed = 0;
  int64_t position = 0;
};

// A number in [0, 1) with 53 random bits: two rounds of the SplitMix64 finaliser.
double uniform(uint64_t seed, int64_t position);

// Throws Error(Numeric) for a NaN, +infinity, or logits that are all -infinity.
int32_t sample(const float* logits, int32_t vocab, const SampleParams& params);

// x - max - log(sum of exp(x - max)), rows [R, V].
void log_softmax(ThreadPool& pool, const float* logits, int32_t num_rows, int32_t vocab,
                 float* out);

struct Penalties {
  const int32_t* ids;     // [C] distinct tokens seen in the prompt or the answer
  const int32_t* counts;  // [C] how often each was generated; 0 if only in the prompt
  int32_t num_seen;
  float repetition, presence, frequency;
};

// out may not be logits. Ids must lie in [0, vocab).
void apply_penalties(const float* logits, int32_t vocab, const Penalties& penalties, float* out);

}  // namespace headrace
