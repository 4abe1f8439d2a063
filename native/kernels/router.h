// Which experts each token goes to.
#pragma once

#include <cstdint>

#include "base/thread_pool.h"

namespace headrace {

// logits [T, E] -> ids and weights [T, A]: softmax over all E, the A largest in descending order,
// ties to the lower id; with `renormalize` divided by their sum, added in that order. Throws
// Error(Numeric) for a NaN or an infinity.
void router_topk(ThreadPool& pool, const float* logits, int32_t num_tokens, int32_t num_experts,
                 int32_t top_k, bool renormalize, int32_t* ids, float* weights);

}  // namespace headrace
