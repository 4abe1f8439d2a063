// Attention over one page, written once over the sixteen-lane type. Included after kernels_float.h,
// in the same namespace and under the same rule: no templates of the standard library.
//
// Stored items are widened to float32 in registers, exactly, and nothing is rounded again: f16,
// bf16 and q8 differ from f32 by what the pool keeps, not by how attention computes.
#pragma once

#include "kernels/attention_table.h"
#include "kernels/kernels_float.h"
#include "kernels/unroll.h"

namespace headrace::HEADRACE_ISA {

template <Format F>
inline constexpr int kItemBytes = F == Format::F32  ? 4
                                  : F == Format::Q8 ? 1
                                                    : 2;

// Sixteen stored items; those of q8 still want their scale.
template <Format F>
Floats load_items(const void* p) {
  if constexpr (F == Format::F32) return load(static_cast<const float*>(p));
  if constexpr (F == Format::F16) return load_f16(p);
  if constexpr (F == Format::BF16) return load_bf16(p);
  if constexpr (F == Format::Q8) return load_int8(p);
}

// The first n < 16 items at p, without reading beyond them.
template <Format F>
Floats load_few_items(const void* p, int n) {
  alignas(64) unsigned char items[64] = {};
  __builtin_memcpy(items, p, static_cast<size_t>(n * kItemBytes<F>));
  return load_items<F>(items);
}

// How much further than into the first cache memory is fetched into the second, so that it is under
// way before a page of 4 KiB begins, where the processor's own fetching stops
// (docs/experiments.md).
constexpr int64_t kFarBytes = 5120;

// Memory that will be read next, fetched line by line between the steps of a computation: the
// hardware does not follow from keys to values and from page to page.
struct Ahead {
  const std::byte* at;
  bool is_on;
};

// The fetches of one loop, each step of which reads `bytes` for the first time and so fetches as
// many.
template <int bytes>
class Fetcher {
 public:
  explicit Fetcher(Ahead& ahead)
      : ahead_(ahead),
        at_(ahead.at),
        hop_(!ahead.is_on ? 0
             : bytes < 64 ? bytes
                          : 64) {}
  ~Fetcher() { ahead_.at = at_; }
  void step() {
    for (int done = 0; done < bytes; done += 64) {
      prefetch(at_);
      prefetch_far(at_ + kFarBytes);
      at_ += hop_;
    }
  }

 private:
  Ahead& ahead_;
  const std::byte* at_;
  int64_t hop_;
};

// A step of `unroll` that is long must be told to be inlined, or its accumulators leave registers.
#define HEADRACE_INLINE __attribute__((always_inline))

template <int n>
HEADRACE_INLINE inline void clear(Floats* acc) {
  unroll<n>([&](int i) HEADRACE_INLINE { acc[i] = splat(0.0f); });
}
// acc[i][j] = fma(x[i], y[j], acc[i][j])
template <int n, int m>
HEADRACE_INLINE inline void add_outer(const Floats* x, const Floats* y, Floats* acc) {
  unroll<n * m>([&](int i) HEADRACE_INLINE { acc[i] = fma(x[i / m], y[i % m], acc[i]); });
}

// ---- grouped queries. Q query heads share every load of a key or a value; the chain of each is
// its own.

using Scores = float[kMaxPageTokens];

// Of a block of Q queries, those whose accumulators stay in registers, and the vectors of keys or
// dims that these go through at once.
template <int Q>
inline constexpr int kTileQueries = Q < kFloatTile ? Q : kFloatTile;
template <int Q, int most>
inline constexpr int kTileVectors =
    kFloatTile / kTileQueries<Q> < most ? kFloatTile / kTileQueries<Q> : most;

// Scores of V vectors of keys for the queries of a tile, the first of which is number `from` of its
// block: a chain over d per key.
template <Format F, int Q, int from, int V>
void page_scores_at(const PageArgs& page, const float* packed, int32_t key, Scores* scores,
                    Ahead& ahead) {
  constexpr int kQueries = kTileQueries<Q>;
  Floats acc[kQueries * V];
  clear<kQueries * V>(acc);
  const int64_t stride = int64_t{page.page_tokens} * kItemBytes<F>;
  const std::byte* keys = page.keys + int64_t{key} * kItemBytes<F>;
  const std::byte* scales = page.keys + page.head_dim * stride + int64_t{key} * 2;
  const int32_t group = F == Format::Q8 ? kKvGroup : page.head_dim;
  Fetcher<from == 0 ? V * 16 * kItemBytes<F> : 0> fetcher(ahead);
  for (int32_t first = 0; first < page.head_dim; first += group) {
    Floats scale[V];
    if constexpr (F == Format::Q8) {
      unroll<V>([&](int v) HEADRACE_INLINE { scale[v] = load_f16(scales + 32 * v); });
      scales += int64_t{page.page_tokens} * 2;
    }
    const int32_t end = page.head_dim - first < group ? page.head_dim : first + group;
    for (int32_t d = first; d < end; ++d) {
      Floats k[V];
      unroll<V>([&](int v) HEADRACE_INLINE {
        k[v] = load_items<F>(keys + 16 * v * kItemBytes<F>);
        if constexpr (F == Format::Q8) k[v] = mul(k[v], scale[v]);
      });
      keys += stride;
      fetcher.step();
      Floats x[kQueries];
      unroll<kQueries>([&](int q)
                           HEADRACE_INLINE { x[q] = splat(packed[int64_t{d} * Q + from + q]); });
      add_outer<kQueries, V>(x, k, acc);
    }
  }
  const Floats scale = splat(page.scale);
  unroll<kQueries * V>([&](int i) HEADRACE_INLINE {
    store(scores[from + i / V] + key + 16 * (i % V), mul(acc[i], scale));
  });
}

// The same for all queries of the block.
template <Format F, int Q, int V, int from = 0>
void block_scores_at(const PageArgs& page, const float* packed, int32_t key, Scores* scores,
                     Ahead& ahead) {
  page_scores_at<F, Q, from, V>(page, packed, key, scores, ahead);
  if constexpr (from + kTileQueries<Q> < Q) {
    block_scores_at<F, Q, V, from + kTileQueries<Q>>(page, packed, key, scores, ahead);
  }
}

// Scores of the keys [begin, end), both moved outwards to multiples of 16.
template <Format F, int Q>
void page_scores(const PageArgs& page, const float* packed, int32_t begin, int32_t end,
                 Scores* scores, Ahead& ahead) {
  constexpr int kVectors = kTileVectors<Q, 4>;
  int32_t key = begin / 16 * 16;
  for (; key + 16 * (kVectors - 1) < end && key + 16 * kVectors <= page.page_tokens;
       key += 16 * kVectors) {
    block_scores_at<F, Q, kVectors>(page, packed, key, scores, ahead);
  }
  for (; key < end; key += 16) block_scores_at<F, Q, 1>(page, packed, key, scores, ahead);
}

// How a page joins what was seen before: accumulator = fma(accumulator, keep, page * take).
struct Join {
  float keep, take;
  bool is_first;
};

// Moves a state's maximum to the larger of its own and a part's; keep and take become the exponents
// of the weights of both. `tail` is the state's maximum and sum.
inline bool raise_maximum(float* tail, float maximum, float& keep, float& take) {
  const bool is_first = tail[1] == 0.0f;
  const float both = is_first || maximum > tail[0] ? maximum : tail[0];
  keep = tail[0] - both;
  take = maximum - both;
  tail[0] = both;
  return is_first;
}

inline void join_sum(const Join& join, float sum, float* tail) {
  tail[1] = join.is_first ? sum : __builtin_fmaf(tail[1], join.keep, sum * join.take);
}

// Scores of N queries become exponentials, those of invisible keys beside visible ones 0. The
// queries go side by side, because the chains of one wait for themselves. Lane l sums the keys
// l, l + 16, ... of the page.
template <int N>
void exponentials(Scores* scores, int32_t begin, int32_t end, float* maxima, float* sums) {
  const int32_t first = begin / 16 * 16;
  for (int q = 0; q < N; ++q) {
    for (int32_t i = first; i < begin; ++i) scores[q][i] = -__builtin_inff();
    for (int32_t i = end; i % 16 != 0; ++i) scores[q][i] = -__builtin_inff();
  }
  Floats best[N];
  unroll<N>([&](int q) HEADRACE_INLINE { best[q] = load(scores[q] + first); });
  for (int32_t i = first + 16; i < end; i += 16) {
    unroll<N>([&](int q) HEADRACE_INLINE { best[q] = max(best[q], load(scores[q] + i)); });
  }
  unroll<N>([&](int q) HEADRACE_INLINE {
    maxima[q] = max_lane(best[q]);
    best[q] = splat(maxima[q]);
  });
  Floats lanes[N];
  clear<N>(lanes);
  for (int32_t i = first; i < end; i += 16) {
    unroll<N>([&](int q) HEADRACE_INLINE {
      const Floats e = exp_lanes(sub(load(scores[q] + i), best[q]));
      store(scores[q] + i, e);
      lanes[q] = add(lanes[q], e);
    });
  }
  unroll<N>([&](int q) HEADRACE_INLINE { sums[q] = tree_sum(lanes[q]); });
}

// The same for all queries, of which those that see something see the same keys if `is_even`.
template <int Q>
void page_exponentials(const PageQuery* queries, bool is_even, Scores* scores, float* maxima,
                       float* sums) {
  constexpr int kTogether = Q < 4 ? Q : 4;
  for (int q = 0; q < Q && is_even; q += kTogether) {
    exponentials<kTogether>(scores + q, queries[0].begin, queries[0].end, maxima + q, sums + q);
  }
  for (int q = 0; q < Q && !is_even; ++q) {
    if (queries[q].begin >= queries[q].end) continue;
    exponentials<1>(scores + q, queries[q].begin, queries[q].end, maxima + q, sums + q);
  }
}

// The page's maximum and sum join those of each query's state.
template <int Q>
void page_softmax(const PageArgs& page, const PageQuery* queries, bool is_even, Scores* scores,
                  Join* joins) {
  alignas(64) float weights[2 * kQueriesTogether] = {};  // to keep, to take
  float maxima[Q], sums[Q];
  page_exponentials<Q>(queries, is_even, scores, maxima, sums);
  for (int q = 0; q < Q; ++q) {
    if (queries[q].begin >= queries[q].end) continue;
    joins[q].is_first = raise_maximum(queries[q].state + page.head_dim, maxima[q], weights[q],
                                      weights[kQueriesTogether + q]);
  }
  store(weights, exp_lanes(load(weights)));
  for (int q = 0; q < Q; ++q) {
    if (queries[q].begin >= queries[q].end) continue;
    joins[q].keep = weights[q];
    joins[q].take = weights[kQueriesTogether + q];
    join_sum(joins[q], sums[q], queries[q].state + page.head_dim);
  }
}

inline void join_values(const Join& join, Floats acc, float* target, int n) {
  if (!join.is_first) {
    acc = fma(load_some(target, n), splat(join.keep), mul(acc, splat(join.take)));
  }
  store_some(target, acc, n);
}

// V vectors of dims from d, n lanes of the last, for the queries of a tile: a chain over the keys
// [begin, end) per dim, starting at 0 in each page. A weight of 0 for a key that a query does not
// see would not do, since 0 * NaN of a stale place is NaN.
template <Format F, int Q, int from, int V>
void page_values_at(const PageArgs& page, const PageQuery* queries, const Scores* weights,
                    const float* scales, const Join* joins, int32_t d, int n, Ahead& ahead) {
  constexpr int kQueries = kTileQueries<Q>;
  Floats acc[kQueries * V];
  clear<kQueries * V>(acc);
  const int64_t stride = int64_t{page.head_dim} * kItemBytes<F>;
  const std::byte* values = page.values + queries[0].begin * stride + int64_t{d} * kItemBytes<F>;
  scales += int64_t{d} / kKvGroup * page.page_tokens;
  Fetcher<from == 0 ? V * 16 * kItemBytes<F> : 0> fetcher(ahead);
  for (int32_t key = queries[0].begin; key < queries[0].end; ++key) {
    Floats value[V];
    unroll<V>([&](int v) HEADRACE_INLINE {
      const std::byte* items = values + 16 * v * kItemBytes<F>;
      value[v] = V == 1 && n < 16 ? load_few_items<F>(items, n) : load_items<F>(items);
      if constexpr (F == Format::Q8) {
        value[v] = mul(value[v], splat(scales[16 * v / kKvGroup * page.page_tokens + key]));
      }
    });
    values += stride;
    fetcher.step();
    Floats w[kQueries];
    unroll<kQueries>([&](int q) HEADRACE_INLINE { w[q] = splat(weights[from + q][key]); });
    add_outer<kQueries, V>(w, value, acc);
  }
  unroll<kQueries * V>([&](int i) HEADRACE_INLINE {
    const int q = from + i / V;
    join_values(joins[q], acc[i], queries[q].state + d + 16 * (i % V), V == 1 ? n : 16);
  });
}

// The same for all queries of the block.
template <Format F, int Q, int V, int from = 0>
void block_values_at(const PageArgs& page, const PageQuery* queries, const Scores* weights,
                     const float* scales, const Join* joins, int32_t d, int n, Ahead& ahead) {
  page_values_at<F, Q, from, V>(page, queries, weights, scales, joins, d, n, ahead);
  if constexpr (from + kTileQueries<Q> < Q) {
    block_values_at<F, Q, V, from + kTileQueries<Q>>(page, queries, weights, scales, joins, d, n,
                                                     ahead);
  }
}

template <Format F, int Q>
void page_values(const PageArgs& page, const PageQuery* queries, const Scores* weights,
                 const float* scales, const Join* joins, Ahead& ahead) {
  constexpr int kMost = Q == 1 ? 8 : 4;
  constexpr int kVectors = kTileVectors<Q, kMost>;
  int32_t d = 0;
  for (; d + 16 * kVectors <= page.head_dim; d += 16 * kVectors) {
    block_values_at<F, Q, kVectors>(page, queries, weights, scales, joins, d, 16, ahead);
  }
  for (; kVectors > 2 && d + 32 <= page.head_dim; d += 32) {
    block_values_at<F, Q, 2>(page, queries, weights, scales, joins, d, 16, ahead);
  }
  for (; d < page.head_dim; d += 16) {
    const int n = page.head_dim - d < 16 ? page.head_dim - d : 16;
    block_values_at<F, Q, 1>(page, queries, weights, scales, joins, d, n, ahead);
  }
}

// The f16 scales of a page's values or latents in float32.
inline void widen_scales(const std::byte* scales, int32_t width, int32_t page_tokens, float* out) {
  const int32_t count = (width + kKvGroup - 1) / kKvGroup * page_tokens;
  for (int32_t i = 0; i < count; i += 16) store(out + i, load_f16(scales + int64_t{i} * 2));
}

template <Format F, int Q>
void attend_together(const PageArgs& page, const PageQuery* queries, const float* packed,
                     Ahead& before_values, Ahead& after_values) {
  int32_t begin = page.page_tokens;
  int32_t end = 0;
  bool is_even = true;
  for (int q = 0; q < Q; ++q) {
    const PageQuery& query = queries[q];
    is_even = is_even && query.begin == queries[0].begin && query.end == queries[0].end;
    if (query.begin >= query.end) continue;
    begin = query.begin < begin ? query.begin : begin;
    end = query.end > end ? query.end : end;
  }
  if (begin >= end) return;
  alignas(64) Scores scores[Q];
  page_scores<F, Q>(page, packed, begin, end, scores, before_values);
  Join joins[Q];
  page_softmax<Q>(page, queries, is_even, scores, joins);
  constexpr int kMaxGroups = F == Format::Q8 ? kMaxHeadDim / kKvGroup : 0;
  alignas(64) float widened[kMaxGroups * kMaxPageTokens + 16];
  const float* scales = nullptr;
  if constexpr (F == Format::Q8) {
    const int64_t codes = int64_t{page.head_dim} * page.page_tokens;
    widen_scales(page.values + codes, page.head_dim, page.page_tokens, widened);
    scales = widened;
  }
  if (is_even) {
    page_values<F, Q>(page, queries, scores, scales, joins, after_values);
    return;
  }
  for (int q = 0; q < Q; ++q) {
    if (queries[q].begin >= queries[q].end) continue;
    page_values<F, 1>(page, queries + q, scores + q, scales, joins + q, after_values);
    after_values.is_on = false;
  }
}

template <Format F>
void attend_page(const PageArgs& page, const PageQuery* queries, int32_t count,
                 const float* packed) {
  // While the first block of queries reads the keys, the values are fetched; while it reads the
  // values, the next page's keys.
  Ahead values{page.values, true};
  Ahead next{page.next_keys == nullptr ? page.keys : page.next_keys, page.next_keys != nullptr};
  for (int32_t done = 0; done < count;) {
    const int32_t block = block_of(count - done);
    const float* block_packed = packed + int64_t{done} * page.head_dim;
    switch (block) {
      case 8:
        attend_together<F, 8>(page, queries + done, block_packed, values, next);
        break;
      case 4:
        attend_together<F, 4>(page, queries + done, block_packed, values, next);
        break;
      case 2:
        attend_together<F, 2>(page, queries + done, block_packed, values, next);
        break;
      default:
        attend_together<F, 1>(page, queries + done, block_packed, values, next);
        break;
    }
    done += block;
    values.is_on = next.is_on = false;
  }
}

// ---- latents. The heads lie side by side in the lanes, since all of them read the same latents.

constexpr int kHeadVectors = kLatentHeads / 16;
constexpr int kLatentKeys = kFloatTile / kHeadVectors;  // tokens scored together
// Vectors of dims, and heads, whose values are summed together.
constexpr int kValueVectors = kFloatTile < 16 ? 1 : 2;
constexpr int kValueHeads = kFloatTile / kValueVectors;

template <Format F>
void widen_latents(const LatentArgs& page, int32_t first, int32_t past, float* scales,
                   float* wide) {
  const int64_t stride = int64_t{page.width} * kItemBytes<F>;
  if constexpr (F == Format::Q8) {
    widen_scales(page.latents + page.page_tokens * stride, page.width, page.page_tokens, scales);
  }
  Ahead ahead{page.next == nullptr ? page.latents : page.next, page.next != nullptr};
  Fetcher<16 * kItemBytes<F>> fetcher(ahead);
  for (int32_t token = first; token < page.end; ++token) {
    const std::byte* items = page.latents + token * stride;
    float* out = wide + int64_t{token} * page.width;
    map_rows(page.width, [&](int64_t d, int n) {
      fetcher.step();
      const std::byte* here = items + d * kItemBytes<F>;
      Floats x = n == 16 ? load_items<F>(here) : load_few_items<F>(here, n);
      if constexpr (F == Format::Q8) {
        x = mul(x, splat(scales[d / kKvGroup * page.page_tokens + token]));
      }
      store_some(out + d, x, n);
    });
  }
  // Scores are computed for several tokens at a time; those past the end are not looked at.
  for (int64_t i = int64_t{page.end} * page.width; i < int64_t{past} * page.width; ++i) {
    wide[i] = 0.0f;
  }
}

// Scores [token][head] of kLatentKeys tokens: a chain over the width per token and head.
inline void latent_scores_at(const LatentArgs& page, const float* wide, float* scores) {
  Floats acc[kLatentKeys * kHeadVectors];
  clear<kLatentKeys * kHeadVectors>(acc);
  for (int32_t d = 0; d < page.width; ++d) {
    const float* query = page.queries + int64_t{d} * kLatentHeads;
    Floats q[kHeadVectors];
    unroll<kHeadVectors>([&](int h) HEADRACE_INLINE { q[h] = load(query + 16 * h); });
    Floats x[kLatentKeys];
    unroll<kLatentKeys>([&](int k)
                            HEADRACE_INLINE { x[k] = splat(wide[int64_t{k} * page.width + d]); });
    add_outer<kLatentKeys, kHeadVectors>(x, q, acc);
  }
  unroll<kLatentKeys * kHeadVectors>([&](int i) HEADRACE_INLINE {
    store(scores + i / kHeadVectors * kLatentHeads + i % kHeadVectors * 16,
          mul(acc[i], splat(page.scale)));
  });
}

// As `exponentials`, for sixteen heads at a time.
inline void latent_exponentials(const LatentArgs& page, float* scores, float* maximum, float* sum) {
  Floats best = load(scores + int64_t{page.begin} * kLatentHeads);
  for (int32_t token = page.begin + 1; token < page.end; ++token) {
    best = max(best, load(scores + int64_t{token} * kLatentHeads));
  }
  store(maximum, best);
  Floats lanes[16];
  for (int l = 0; l < 16; ++l) lanes[l] = splat(0.0f);
  for (int32_t token = page.begin; token < page.end; ++token) {
    float* score = scores + int64_t{token} * kLatentHeads;
    const Floats e = exp_lanes(sub(load(score), best));
    store(score, e);
    lanes[token % 16] = add(lanes[token % 16], e);
  }
  for (int half = 8; half > 0; half /= 2) {
    for (int l = 0; l < half; ++l) lanes[l] = add(lanes[l], lanes[l + half]);
  }
  store(sum, lanes[0]);
}

inline void latent_softmax(const LatentArgs& page, float* scores, Join* joins) {
  alignas(64) float maxima[kLatentHeads], sums[kLatentHeads];
  alignas(64) float keep[kLatentHeads] = {}, take[kLatentHeads] = {};
  for (int h = 0; h < kHeadVectors; ++h) {
    latent_exponentials(page, scores + 16 * h, maxima + 16 * h, sums + 16 * h);
  }
  const int64_t stride = state_stride(page.value_dim);
  for (int h = 0; h < kLatentHeads; ++h) {
    float* tail = page.states + h * stride + page.value_dim;
    joins[h].is_first = raise_maximum(tail, maxima[h], keep[h], take[h]);
  }
  for (int h = 0; h < kLatentHeads; h += 16) {
    store(keep + h, exp_lanes(load(keep + h)));
    store(take + h, exp_lanes(load(take + h)));
  }
  for (int h = 0; h < kLatentHeads; ++h) {
    joins[h].keep = keep[h];
    joins[h].take = take[h];
    join_sum(joins[h], sums[h], page.states + h * stride + page.value_dim);
  }
}

// V vectors of dims from d, n lanes of the last, of kValueHeads heads: a chain over the tokens.
template <int V>
void latent_values_at(const LatentArgs& page, const float* wide, const float* weights,
                      const Join* joins, float* states, int32_t d, int n) {
  Floats acc[kValueHeads * V];
  clear<kValueHeads * V>(acc);
  for (int32_t token = page.begin; token < page.end; ++token) {
    const float* row = wide + int64_t{token} * page.width + d;
    Floats value[V];
    unroll<V>([&](int v)
                  HEADRACE_INLINE { value[v] = V == 1 ? load_some(row, n) : load(row + 16 * v); });
    Floats w[kValueHeads];
    unroll<kValueHeads>(
        [&](int h) HEADRACE_INLINE { w[h] = splat(weights[int64_t{token} * kLatentHeads + h]); });
    add_outer<kValueHeads, V>(w, value, acc);
  }
  unroll<kValueHeads * V>([&](int i) HEADRACE_INLINE {
    float* target = states + int64_t{i / V} * state_stride(page.value_dim) + d + 16 * (i % V);
    join_values(joins[i / V], acc[i], target, V == 1 ? n : 16);
  });
}

template <Format F>
void attend_latents(const LatentArgs& page) {
  float* scores = page.scratch;
  float* scales = scores + int64_t{page.page_tokens} * kLatentHeads;
  float* wide = scales + (int64_t{page.width} / kKvGroup + 1) * page.page_tokens;
  const int32_t first = page.begin / kLatentKeys * kLatentKeys;
  const int32_t past = (page.end + kLatentKeys - 1) / kLatentKeys * kLatentKeys;
  widen_latents<F>(page, first, past, scales, wide);
  for (int32_t token = first; token < past; token += kLatentKeys) {
    latent_scores_at(page, wide + int64_t{token} * page.width,
                     scores + int64_t{token} * kLatentHeads);
  }
  Join joins[kLatentHeads];
  latent_softmax(page, scores, joins);
  // Dims outside, heads inside: the values of a few dims stay in the first cache for all heads.
  for (int32_t d = 0; d < page.value_dim;) {
    const int32_t left = page.value_dim - d;
    const bool is_whole = left >= 16 * kValueVectors;
    for (int32_t h = 0; h < page.num_heads; h += kValueHeads) {
      float* states = page.states + int64_t{h} * state_stride(page.value_dim);
      if (is_whole) {
        latent_values_at<kValueVectors>(page, wide, scores + h, joins + h, states, d, 16);
      } else {
        latent_values_at<1>(page, wide, scores + h, joins + h, states, d, left < 16 ? left : 16);
      }
    }
    d += is_whole ? 16 * kValueVectors : 16;
  }
}

// ---- states

inline void join_state(const float* part, int32_t width, float* state) {
  const float sum = part[width + 1];
  if (sum == 0.0f) return;
  alignas(64) float weights[16] = {};
  const bool is_first = raise_maximum(state + width, part[width], weights[0], weights[1]);
  store(weights, exp_lanes(load(weights)));
  const Join join{weights[0], weights[1], is_first};
  map_rows(width,
           [&](int64_t d, int n) { join_values(join, load_some(part + d, n), state + d, n); });
  join_sum(join, sum, state + width);
}

inline void finish_state(const float* state, int32_t width, const float* sink, float* out) {
  if (sink == nullptr) {
    divide_row(state, state[width + 1], width, out);
    return;
  }
  const float both = state[width] > *sink ? state[width] : *sink;
  alignas(64) float weights[16] = {state[width] - both, *sink - both};
  store(weights, exp_lanes(load(weights)));
  const Floats keep = splat(weights[0]);
  const Floats sum = splat(__builtin_fmaf(state[width + 1], weights[0], weights[1]));
  map_rows(width, [&](int64_t d, int n) {
    store_some(out + d, div(mul(load_some(state + d, n), keep), sum), n);
  });
}

inline constexpr AttentionTable attention_table = {
    {attend_page<Format::F32>, attend_page<Format::F16>, attend_page<Format::BF16>,
     attend_page<Format::Q8>},
    {attend_latents<Format::F32>, attend_latents<Format::F16>, attend_latents<Format::BF16>,
     attend_latents<Format::Q8>},
    join_state,
    finish_state,
};

#undef HEADRACE_INLINE

}  // namespace headrace::HEADRACE_ISA
