#include "kernels/router.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <numeric>
#include <string>

#include "base/array_pool.h"
#include "base/error.h"
#include "kernels/kernel_table.h"
#include "kernels/linear.h"

namespace headrace {
namespace {

// p and order: room for one number per expert.
bool route_one(const KernelTable& table, const float* logits, int32_t num_experts, int32_t top_k,
               bool renormalize, float* p, int32_t* order, int32_t* ids, float* weights) {
  for (int32_t e = 0; e < num_experts; ++e) {
    if (!std::isfinite(logits[e])) return false;
  }
  const float maximum = table.max_of(logits, num_experts);
  const float sum = table.exp_sum(logits, maximum, 1.0f, num_experts, p);
  table.divide(p, sum, num_experts, p);
  std::iota(order, order + num_experts, 0);
  std::partial_sort(order, order + top_k, order + num_experts,
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
    PoolBuffer<float> p(num_experts);
    PoolBuffer<int32_t> order(num_experts);
    for (int64_t t = begin; t < end; ++t) {
      if (!route_one(table, logits + t * num_experts, num_experts, top_k, renormalize, p.get(),
                     order.get(), ids + t * top_k, weights + t * top_k)) {
        bad.store(t);
      }
    }
  });
  if (bad.load() >= 0) {
    throw Error(ErrorKind::Numeric, "router_topk: NaN or infinity in the router logits of token " +
                                        std::to_string(bad.load()));
  }
}

void check_router(const Router& router) {
  if (router.weight.format != Format::F32) {
    throw Error(ErrorKind::Shape, "router_topk: the router must be f32, got " +
                                      std::string(format_name(router.weight.format)));
  }
  const int32_t num_experts = router.weight.rows;
  if (router.num_chosen < 1 || router.num_chosen > num_experts) {
    throw Error(ErrorKind::Shape, "router_topk: top_k out of range\nexpected 1 to " +
                                      std::to_string(num_experts) + ", got " +
                                      std::to_string(router.num_chosen));
  }
}

void route(ThreadPool& pool, const float* x, int32_t num_tokens, const Router& router, int32_t* ids,
           float* weights) {
  check_router(router);
  const int32_t num_experts = router.weight.rows;
  PoolBuffer<float> logits(int64_t{num_tokens} * num_experts);
  float* const outs[1] = {logits.get()};
  linears(pool, x, num_tokens, std::span(&router.weight, 1), outs, "router_topk");
  router_topk(pool, logits.get(), num_tokens, num_experts, router.num_chosen, router.renormalize,
              ids, weights);
}

}  // namespace headrace
