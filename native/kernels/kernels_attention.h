// Attention over one page, written once over the sixteen-lane type. Included after kernels_float.h,
// in the same namespace and under the same rule: no templates of the standard library.
#pragma once

#include "kernels/kernels_float.h"

namespace headrace::HEADRACE_ISA {

// Q query heads share every load of a key or a value; the chain of each is its own.

using Scores = float[kMaxPageTokens];

// Scores of V vectors of keys: a chain over d per key.
template <int Q, int V>
void page_scores_at(const PageArgs& page, const PageQuery* queries, int32_t key, Scores* scores) {
  Floats acc[Q][V];
  for (int q = 0; q < Q; ++q) {
    for (int v = 0; v < V; ++v) acc[q][v] = splat(0.0f);
  }
  for (int32_t d = 0; d < page.head_dim; ++d) {
    const float* keys = page.keys + int64_t{d} * page.page_tokens + key;
    Floats k[V];
    for (int v = 0; v < V; ++v) k[v] = load(keys + 16 * v);
    for (int q = 0; q < Q; ++q) {
      const Floats x = splat(queries[q].query[d]);
      for (int v = 0; v < V; ++v) acc[q][v] = fma(x, k[v], acc[q][v]);
    }
  }
  const Floats scale = splat(page.scale);
  for (int q = 0; q < Q; ++q) {
    for (int v = 0; v < V; ++v) store(scores[q] + key + 16 * v, mul(acc[q][v], scale));
  }
}

template <int Q>
void page_scores(const PageArgs& page, const PageQuery* queries, Scores* scores) {
  int32_t key = 0;
  for (; key + 64 <= page.page_tokens; key += 64) {
    page_scores_at<Q, 4>(page, queries, key, scores);
  }
  for (; key < page.page_tokens; key += 16) page_scores_at<Q, 1>(page, queries, key, scores);
}

// How a page joins what was seen before: accumulator = fma(accumulator, keep, page * take).
struct Join {
  float keep, take;
};

// Scores become exponentials; the page's maximum and sum join the query's.
inline Join page_softmax(const PageArgs& page, const PageQuery& query, float* scores) {
  const float maximum = max_of(scores, query.num_keys);
  Floats lanes = splat(0.0f);
  for (int32_t i = 0; i < query.num_keys; i += 16) {
    const int n = query.num_keys - i < 16 ? query.num_keys - i : 16;
    store(scores + i, exp_lanes(sub(load(scores + i), splat(maximum))));
    lanes = add(lanes, load_some(scores + i, n));
  }
  const float sum = tree_sum(lanes);
  if (page.is_first) {
    *query.maximum = maximum;
    *query.sum = sum;
    return {0.0f, 1.0f};
  }
  const float both = *query.maximum > maximum ? *query.maximum : maximum;
  float weights[16] = {*query.maximum - both, maximum - both};
  store(weights, exp_lanes(load(weights)));
  *query.maximum = both;
  *query.sum = __builtin_fmaf(*query.sum, weights[0], sum * weights[1]);
  return {weights[0], weights[1]};
}

inline void join_values(const PageArgs& page, const Join& join, Floats acc, float* target, int n) {
  if (!page.is_first) {
    acc = fma(load_some(target, n), splat(join.keep), mul(acc, splat(join.take)));
  }
  store_some(target, acc, n);
}

// V vectors of dims from d: a chain over the keys per dim, starting at 0 in each page. All queries
// see num_keys keys: a weight of 0 for the others would not do, since 0 * NaN of a stale place is
// NaN.
template <int Q, int V>
void page_values_at(const PageArgs& page, const PageQuery* queries, int32_t num_keys,
                    const Scores* weights, const Join* joins, int32_t d) {
  Floats acc[Q][V];
  for (int q = 0; q < Q; ++q) {
    for (int v = 0; v < V; ++v) acc[q][v] = splat(0.0f);
  }
  for (int32_t key = 0; key < num_keys; ++key) {
    const float* row = page.values + int64_t{key} * page.head_dim + d;
    Floats value[V];
    for (int v = 0; v < V; ++v) value[v] = load(row + 16 * v);
    for (int q = 0; q < Q; ++q) {
      const Floats w = splat(weights[q][key]);
      for (int v = 0; v < V; ++v) acc[q][v] = fma(w, value[v], acc[q][v]);
    }
  }
  for (int q = 0; q < Q; ++q) {
    for (int v = 0; v < V; ++v) {
      join_values(page, joins[q], acc[q][v], queries[q].accumulator + d + 16 * v, 16);
    }
  }
}

// The last dims, fewer than 16.
inline void page_values_rest(const PageArgs& page, const PageQuery& query, const float* weights,
                             const Join& join, int32_t d) {
  const int n = static_cast<int>(page.head_dim - d);
  Floats acc = splat(0.0f);
  for (int32_t key = 0; key < query.num_keys; ++key) {
    const float* row = page.values + int64_t{key} * page.head_dim + d;
    acc = fma(splat(weights[key]), load_part(row, n), acc);
  }
  join_values(page, join, acc, query.accumulator + d, n);
}

template <int Q>
void page_values(const PageArgs& page, const PageQuery* queries, const Scores* weights,
                 const Join* joins) {
  const int32_t num_keys = queries[0].num_keys;
  int32_t d = 0;
  for (; d + 64 <= page.head_dim; d += 64) {
    page_values_at<Q, 4>(page, queries, num_keys, weights, joins, d);
  }
  for (; d + 16 <= page.head_dim; d += 16) {
    page_values_at<Q, 1>(page, queries, num_keys, weights, joins, d);
  }
  if (d == page.head_dim) return;
  for (int q = 0; q < Q; ++q) page_values_rest(page, queries[q], weights[q], joins[q], d);
}

template <int Q>
void attend_together(const PageArgs& page, const PageQuery* queries) {
  alignas(64) Scores scores[Q];
  page_scores<Q>(page, queries, scores);
  Join joins[Q];
  bool is_even = true;
  for (int q = 0; q < Q; ++q) {
    joins[q] = page_softmax(page, queries[q], scores[q]);
    is_even = is_even && queries[q].num_keys == queries[0].num_keys;
  }
  if (is_even) {
    page_values<Q>(page, queries, scores, joins);
  } else {
    for (int q = 0; q < Q; ++q) page_values<1>(page, queries + q, scores + q, joins + q);
  }
}

inline void attend_page(const PageArgs& page, const PageQuery* queries, int32_t count) {
  int32_t q = 0;
  for (; q + 4 <= count; q += 4) attend_together<4>(page, queries + q);
  for (; q < count; ++q) attend_together<1>(page, queries + q);
}

}  // namespace headrace::HEADRACE_ISA
