// The feed-forward network of a mixture of experts, computed in the order in which records arrive
// and summed in the order of the contract.
#pragma once

#include <cstdint>

#include "base/record_feed.h"
#include "base/thread_pool.h"
#include "kernels/format.h"
#include "kernels/router.h"

namespace headrace {

// down(silu(gate x) * (up x)) for resident matrices: out [T, rows of down].
void swiglu_ffn(ThreadPool& pool, const float* x, int32_t num_rows, const MatrixView& gate,
                const MatrixView& up, const MatrixView& down, float* out);

struct RoutedTokens {
  const float* x;                          // [T, D]
  const int32_t* ids;                      // [T, A]
  const float* weights;                    // [T, A]
  int32_t num_tokens, hidden, num_chosen;  // T, D, A
  float* activations = nullptr;            // [T, A, F] takes the inputs of down, if somebody asks
};

// out[t] = chain over the experts of t in ascending id: out = fma(weight, y, out), out starts at 0.
// Throws Error(Shape) for an id the feed does not hold, Error(Numeric) for a NaN or infinity on the
// way, and whatever next_ready throws; a record it was computing then is not `done`, the lease's
// release frees it.
void moe_ffn(ThreadPool& pool, const RoutedTokens& tokens, RecordFeed& feed, float* out);

// The next layer that routes, for a guess at what it will ask for: its router on the hidden state
// that this layer's x was normed from.
struct NextRouter {
  const float* hidden;  // [T, D]
  const float* norm;    // [D]
  float eps;
  Router router;
  int32_t layer;
};

// From the router to the sum: x [T, D] -> out [T, D]. The ids go to the source the moment they are
// known; what it holds is computed while it fetches the rest. With `next`, a source that wants
// advice is told what comes after. Throws as route, RecordSource::feed and moe_ffn.
void routed_ffn(ThreadPool& pool, const float* x, int32_t num_tokens, const Router& router,
                RecordSource& source, int32_t layer, const NextRouter* next, float* out);

}  // namespace headrace
