// Which experts each token goes to.
#pragma once

#include <cstdint>

#include "base/thread_pool.h"
#include "kernels/format.h"

namespace headrace {

// logits [T, E] -> ids and weights [T, A]: softmax over all E, the A largest in descending order,
// ties to the lower id; with `renormalize` divided by their sum, added in that order. Throws
// Error(Numeric) for a NaN or an infinity.
void router_topk(ThreadPool& pool, const float* logits, int32_t num_tokens, int32_t num_experts,
                 int32_t top_k, bool renormalize, int32_t* ids, float* weights);

struct Router {
  MatrixView weight;   // [E, D] in f32
  int32_t num_chosen;  // A, 1 to E
  bool renormalize;
};

// Throws Error(Shape) for a router of another format or an A out of range.
void check_router(const Router& router);

// The same for x [T, D]: logits are `weight x`. Checks the router.
void route(ThreadPool& pool, const float* x, int32_t num_tokens, const Router& router, int32_t* ids,
           float* weights);

}  // namespace headrace
