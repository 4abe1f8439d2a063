#include "kernels/router.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "base/error.h"
#include "kernels/kernel_table.h"

namespace headrace {
namespace {

bool route_one(const KernelTable& table, const float* logits, int32_t num_experts, int32_t top_k,
               bool renormalize, int32_t* ids, float* weights) {
  for (int32_t e = 0; e < num_experts; ++e) {
    if (!std::isfinite(logits[e])) return false;
  }
  std::vector<float> p(num_experts);
  const float maximum = table.max_of(logits, num_experts);
  const float sum = table.exp_sum(logits, maximum, 1.0f, num_experts, p.data());
  table.divide(p.data(), sum, num_experts, p.data());
  std::vector<int32_t> order(num_experts);
  std::iota(order.begin(), order.end(), 0);
  std::partial_sort(order.begin(), order.begin() + top_k, order.end(),
                    [&](int32_t a, int32_t b) { return p[a] != p[b] ? p[a] > p[b] : a < b; });
  float total = 0.0f;
  for (int32_t a = 0; a < top_k; ++a) {
    ids[a] = order[a];
    weights[a] = p[order[a]];
    total += weights[a];
  }
  if (renormalize) table.divide(weights, total, top_k, weights);
  return true;
}

}  // namespace

void router_topk(ThreadPool& pool, const float* logits, int32_t num_tokens, int32_t num_experts,
                 int32_t top_k, bool renormalize, int32_t* ids, float* weights) {
  const KernelTable& table = kernels();
  std::atomic<int64_t> bad{-1};
  pool.run_ranges(num_tokens, 8, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      if (!route_one(table, logits + t * num_experts, num_experts, top_k, renormalize,
                     ids + t * top_k, weights + t * top_k)) {
        bad.store(t);
      }
    }
  });
  if (bad.load() >= 0) {
    throw Error(ErrorKind::Numeric, "router_topk: NaN or infinity in the router logits of token " +
                                        std::to_string(bad.load()));
  }
}

}  // namespace headrace
