// Attention from projections to mixed values: norms per head, rope, pages, attention.
#pragma once

#include <cstdint>

#include "base/thread_pool.h"
#include "kernels/attention.h"

namespace headrace {

struct Projections {
  const float *q, *k, *v;        // [T, H * Dh], [T, K * Dh] twice
  const float *q_norm, *k_norm;  // [Dh] each, for every head by itself; null: none
  float eps;                     // of the norms
  const float *cos, *sin;        // [T, half]
  int32_t half, num_heads;       // rotated pairs of a head; H
};

// Norms and turns every head of q and k, writes keys and values at their rows' positions, then
// attends: out [T, H * Dh]. The same bits as rms_norm, rope, kv_write and paged_attention in turn.
void rotary_attention(ThreadPool& threads, const KvPool& pool, int32_t layer, const Projections& in,
                      const AttentionParams& params, const StepRows& rows, float* out);

}  // namespace headrace
