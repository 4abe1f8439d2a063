// The float kernels, written once over the sixteen-lane type of the instruction set that includes them.
// Everything lives in that set's namespace: nothing here may be shared with a unit built for the
// baseline processor, so the standard library's templates stay out.
#pragma once

#include <cstdint>

#include "kernels/kernel_table.h"

namespace headrace::HEADRACE_ISA {

// The one order in which sixteen lanes become a number.
inline float tree_sum(Floats lanes) {
  float v[16];
  store(v, lanes);
  for (int half = 8; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) v[i] += v[i + half];
  }
  return v[0];
}

inline float max_lane(Floats lanes) {
  float v[16];
  store(v, lanes);
  float best = v[0];
  for (int i = 1; i < 16; ++i) best = best > v[i] ? best : v[i];
  return best;
}

// exp by x = n ln2 + r, |r| <= ln2/2, Taylor to degree 7 (relative error below 2^-26 before rounding).
// Below -104 the result is 0, above 88.8 infinity; NaN stays NaN.
inline Floats exp_lanes(Floats x) {
  x = min(splat(89.0f), max(splat(-104.0f), x));
  // Adding 1.5 * 2^23 leaves the rounded integer in the low bits of the sum.
  const Floats magic = splat(12582912.0f);
  const Floats shifted = fma(x, splat(1.44269504f), magic);
  const Floats n = sub(shifted, magic);
  const Floats r = fma(n, splat(-1.42860677e-6f), fma(n, splat(-0.693145752f), x));
  Floats p = splat(1.98412698e-4f);
  p = fma(p, r, splat(1.38888889e-3f));
  p = fma(p, r, splat(8.33333333e-3f));
  p = fma(p, r, splat(4.16666667e-2f));
  p = fma(p, r, splat(1.66666667e-1f));
  p = fma(p, r, splat(0.5f));
  p = fma(p, r, splat(1.0f));
  p = fma(p, r, splat(1.0f));
  // 2^n in two factors, so that subnormal results round once and 2^128 does not overflow early.
  const Ints whole = sub(bits_of(shifted), bits_of(magic));
  const Ints half = shift_right<1>(whole);
  const Ints rest = sub(whole, half);
  const Ints bias = splat_int(127);
  p = mul(p, from_bits(shift_left<23>(add(half, bias))));
  return mul(p, from_bits(shift_left<23>(add(rest, bias))));
}

inline Floats silu_lanes(Floats x) {
  return div(x, add(splat(1.0f), exp_lanes(sub(splat(0.0f), x))));
}

// Applies f to 16 elements at a time; the last, partial step sees zeros beyond the end.
template <class F>
void map_rows(int64_t count, F f) {
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) f(i, 16);
  if (i < count) f(i, static_cast<int>(count - i));
}

inline Floats load_some(const float* p, int n) { return n == 16 ? load(p) : load_part(p, n); }
inline void store_some(float* p, Floats a, int n) {
  if (n == 16) {
    store(p, a);
  } else {
    store_part(p, a, n);
  }
}

inline bool quantise_row(const float* x, int32_t cols, int32_t group, int8_t* codes, float* scales,
                         int32_t* sums) {
  const Ints magnitude = splat_int(0x7fffffff);
  int32_t worst = 0;
  for (int32_t g = 0; g * group < cols; ++g) {
    const float* in = x + g * group;
    const int32_t here = cols - g * group < group ? cols - g * group : group;
    Ints largest = splat_int(0);
    for (int32_t i = 0; i < here; i += 16) {
      const int n = here - i < 16 ? here - i : 16;
      largest = max(largest, bit_and(bits_of(load_some(in + i, n)), magnitude));
    }
    int32_t lanes[16];
    store(lanes, largest);
    // Magnitudes compare as integers, so a NaN or an infinity is simply a large one.
    int32_t bits = 0;
    for (int32_t lane : lanes) bits = lane > bits ? lane : bits;
    worst = bits > worst ? bits : worst;
    float amax;
    __builtin_memcpy(&amax, &bits, 4);
    const bool is_zero = amax < kLeastAmax;
    scales[g] = is_zero ? 0.0f : amax / 127.0f;
    const Floats inverse = splat(is_zero ? 0.0f : 127.0f / amax);
    Ints sum = splat_int(0);
    for (int32_t i = 0; i < group; i += 16) {
      const int n = here - i < 16 ? (here - i < 0 ? 0 : here - i) : 16;
      const Ints code = round_to_int(mul(load_some(in + i, n), inverse));
      store_int8(codes + g * group + i, code);
      sum = add(sum, code);
    }
    store(lanes, sum);
    int32_t total = 0;
    for (int32_t lane : lanes) total += lane;
    sums[g] = total;
  }
  return worst < 0x7f800000;
}

inline void rms_norm_row(const float* x, const float* weight, float eps, int32_t count, float* out) {
  Floats squares = splat(0.0f);
  map_rows(count, [&](int64_t i, int n) {
    const Floats v = load_some(x + i, n);
    squares = fma(v, v, squares);
  });
  const float mean = tree_sum(squares) / static_cast<float>(count);
  const Floats inverse = splat(1.0f / __builtin_sqrtf(mean + eps));
  map_rows(count, [&](int64_t i, int n) {
    const Floats normed = mul(load_some(x + i, n), inverse);
    store_some(out + i, mul(normed, load_some(weight + i, n)), n);
  });
}

inline void silu_mul(const float* gate, const float* up, int64_t count, float* out) {
  map_rows(count, [&](int64_t i, int n) {
    store_some(out + i, mul(silu_lanes(load_some(gate + i, n)), load_some(up + i, n)), n);
  });
}

inline void add_row(const float* x, const float* y, int64_t count, float* out) {
  map_rows(count, [&](int64_t i, int n) {
    store_some(out + i, add(load_some(x + i, n), load_some(y + i, n)), n);
  });
}

inline void clamp_row(const float* x, float limit, int64_t count, float* out) {
  map_rows(count, [&](int64_t i, int n) {
    const Floats v = min(splat(limit), max(splat(-limit), load_some(x + i, n)));
    store_some(out + i, v, n);
  });
}

inline void fma_row(float weight, const float* y, int64_t count, float* out) {
  map_rows(count, [&](int64_t i, int n) {
    store_some(out + i, fma(splat(weight), load_some(y + i, n), load_some(out + i, n)), n);
  });
}

inline float max_of(const float* x, int64_t count) {
  Floats best = splat(x[0]);
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) best = max(best, load(x + i));
  float result = max_lane(best);
  for (; i < count; ++i) result = result > x[i] ? result : x[i];
  return result;
}

inline float exp_sum(const float* x, float maximum, float temperature, int64_t count, float* out) {
  Floats sum = splat(0.0f);
  map_rows(count, [&](int64_t i, int n) {
    const Floats scaled = div(sub(load_some(x + i, n), splat(maximum)), splat(temperature));
    store_some(out + i, exp_lanes(scaled), n);
    sum = add(sum, load_some(out + i, n));  // read back: lanes beyond the end count as 0
  });
  return tree_sum(sum);
}

inline void divide_row(const float* x, float divisor, int64_t count, float* out) {
  map_rows(count, [&](int64_t i, int n) {
    store_some(out + i, div(load_some(x + i, n), splat(divisor)), n);
  });
}

inline void rope_head(const float* x, const float* cos, const float* sin, int32_t half,
                      int32_t head_dim, float* out) {
  map_rows(half, [&](int64_t i, int n) {
    const Floats a = load_some(x + i, n);
    const Floats b = load_some(x + half + i, n);
    const Floats c = load_some(cos + i, n);
    const Floats s = load_some(sin + i, n);
    // a cos - b sin and b cos + a sin: the plain product first, then one fused step.
    store_some(out + i, fma(sub(splat(0.0f), b), s, mul(a, c)), n);
    store_some(out + half + i, fma(a, s, mul(b, c)), n);
  });
  for (int32_t i = 2 * half; i < head_dim; ++i) out[i] = x[i];
}

inline void widen(Format dtype, const void* source, int64_t count, float* out) {
  const unsigned char* bytes = static_cast<const unsigned char*>(source);
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    if (dtype == Format::F32) store(out + i, load(reinterpret_cast<const float*>(bytes + i * 4)));
    if (dtype == Format::F16) store(out + i, load_f16(bytes + i * 2));
    if (dtype == Format::BF16) store(out + i, load_bf16(bytes + i * 2));
  }
  if (i == count) return;
  const int64_t item = dtype == Format::F32 ? 4 : 2;
  alignas(64) unsigned char rest[64] = {};
  __builtin_memcpy(rest, bytes + i * item, static_cast<size_t>((count - i) * item));
  float wide[16];
  widen(dtype, rest, 16, wide);
  __builtin_memcpy(out + i, wide, static_cast<size_t>((count - i) * 4));
}

inline uint32_t read_bytes(const void* data, int64_t num_bytes) {
  const unsigned char* p = static_cast<const unsigned char*>(data);
  Ints a = splat_int(0), b = a, c = a, d = a;
  int64_t i = 0;
  for (; i + 256 <= num_bytes; i += 256) {
    for (int line = 0; line < 4; ++line) prefetch(p + i + line * 64 + 2048);
    a = add(a, bits_of(load(reinterpret_cast<const float*>(p + i))));
    b = add(b, bits_of(load(reinterpret_cast<const float*>(p + i + 64))));
    c = add(c, bits_of(load(reinterpret_cast<const float*>(p + i + 128))));
    d = add(d, bits_of(load(reinterpret_cast<const float*>(p + i + 192))));
  }
  int32_t lanes[16];
  store(lanes, add(add(a, b), add(c, d)));
  uint32_t sum = 0;
  for (int32_t lane : lanes) sum += static_cast<uint32_t>(lane);
  for (; i < num_bytes; ++i) sum += p[i];
  return sum;
}

// ---- attention

// Scores of one page: a chain over d per key, four vectors of keys in flight.
inline void page_scores(const PageArgs& a, float* scores) {
  const Floats scale = splat(a.scale);
  int32_t key = 0;
  for (; key + 64 <= a.page_tokens; key += 64) {
    Floats s0 = splat(0.0f), s1 = s0, s2 = s0, s3 = s0;
    for (int32_t d = 0; d < a.head_dim; ++d) {
      const float* k = a.keys + int64_t{d} * a.page_tokens + key;
      const Floats q = splat(a.query[d]);
      s0 = fma(q, load(k), s0);
      s1 = fma(q, load(k + 16), s1);
      s2 = fma(q, load(k + 32), s2);
      s3 = fma(q, load(k + 48), s3);
    }
    store(scores + key, mul(s0, scale));
    store(scores + key + 16, mul(s1, scale));
    store(scores + key + 32, mul(s2, scale));
    store(scores + key + 48, mul(s3, scale));
  }
  for (; key < a.page_tokens; key += 16) {
    Floats s = splat(0.0f);
    for (int32_t d = 0; d < a.head_dim; ++d) {
      s = fma(splat(a.query[d]), load(a.keys + int64_t{d} * a.page_tokens + key), s);
    }
    store(scores + key, mul(s, scale));
  }
}

// accumulator = a * accumulator + sum over keys of p * V, the page's chain starting at 0.
template <int vectors>
void page_values(const PageArgs& a, const float* p, float keep, float take, float* accumulator,
                 int32_t d) {
  Floats acc[vectors];
  for (int v = 0; v < vectors; ++v) acc[v] = splat(0.0f);
  for (int32_t key = 0; key < a.num_keys; ++key) {
    const float* row = a.values + int64_t{key} * a.head_dim + d;
    const Floats weight = splat(p[key]);
    for (int v = 0; v < vectors; ++v) acc[v] = fma(weight, load(row + 16 * v), acc[v]);
  }
  for (int v = 0; v < vectors; ++v) {
    float* target = accumulator + d + 16 * v;
    const Floats merged =
        a.is_first ? acc[v] : fma(load(target), splat(keep), mul(acc[v], splat(take)));
    store(target, merged);
  }
}

inline void page_values_tail(const PageArgs& a, const float* p, float keep, float take,
                             float* accumulator, int32_t d) {
  const int n = static_cast<int>(a.head_dim - d);
  Floats acc = splat(0.0f);
  for (int32_t key = 0; key < a.num_keys; ++key) {
    acc = fma(splat(p[key]), load_part(a.values + int64_t{key} * a.head_dim + d, n), acc);
  }
  const Floats old = load_part(accumulator + d, n);
  store_part(accumulator + d, a.is_first ? acc : fma(old, splat(keep), mul(acc, splat(take))), n);
}

inline void attend_page(const PageArgs& a, const AttentionState& state) {
  alignas(64) float scores[kMaxPageTokens];
  page_scores(a, scores);
  float maximum = scores[0];
  for (int32_t i = 1; i < a.num_keys; ++i) maximum = maximum > scores[i] ? maximum : scores[i];
  Floats lanes = splat(0.0f);
  for (int32_t i = 0; i < a.num_keys; i += 16) {
    const int n = a.num_keys - i < 16 ? a.num_keys - i : 16;
    const Floats e = exp_lanes(sub(load(scores + i), splat(maximum)));
    store(scores + i, e);
    lanes = add(lanes, load_part(scores + i, n));
  }
  const float sum = tree_sum(lanes);

  float keep = 0.0f;
  float take = 1.0f;
  if (a.is_first) {
    *state.maximum = maximum;
    *state.sum = sum;
  } else {
    const float both = *state.maximum > maximum ? *state.maximum : maximum;
    float weights[16] = {*state.maximum - both, maximum - both};
    store(weights, exp_lanes(load(weights)));
    keep = weights[0];
    take = weights[1];
    *state.maximum = both;
    *state.sum = __builtin_fmaf(*state.sum, keep, sum * take);
  }
  int32_t d = 0;
  for (; d + 128 <= a.head_dim; d += 128) page_values<8>(a, scores, keep, take, state.accumulator, d);
  for (; d + 16 <= a.head_dim; d += 16) page_values<1>(a, scores, keep, take, state.accumulator, d);
  if (d < a.head_dim) page_values_tail(a, scores, keep, take, state.accumulator, d);
}

inline void finish_attention(const AttentionState& state, int32_t head_dim, float* out) {
  divide_row(state.accumulator, *state.sum, head_dim, out);
}

}  // namespace headrace::HEADRACE_ISA
