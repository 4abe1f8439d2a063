// The float kernels, written once over the sixteen-lane type of the instruction set that includes
// them. Everything lives in that set's namespace: nothing here may be shared with a unit built for
// the baseline processor, so the standard library's templates stay out.
#pragma once

#include <cstdint>

#include "kernels/kernel_table.h"
#include "kernels/unroll.h"

namespace headrace::HEADRACE_ISA {

template <int distance>
Ints swap_lanes(Ints a) {
  return bits_of(swap_lanes<distance>(from_bits(a)));
}
inline int32_t first_lane(Ints a) {
  const float lane = first_lane(from_bits(a));
  int32_t bits;
  __builtin_memcpy(&bits, &lane, 4);
  return bits;
}

// The one order in which sixteen lanes become a number: (l, l + 8), (l, l + 4), (l, l + 2), (l, l +
// 1). Lane 0 holds the result; the others compute along.
template <class Lanes, class Join>
[[gnu::always_inline]] inline auto join_lanes(Lanes lanes, Join join) {
  lanes = join(lanes, swap_lanes<8>(lanes));
  lanes = join(lanes, swap_lanes<4>(lanes));
  lanes = join(lanes, swap_lanes<2>(lanes));
  return first_lane(join(lanes, swap_lanes<1>(lanes)));
}

inline float tree_sum(Floats lanes) {
  return join_lanes(lanes,
                    [](Floats a, Floats b) __attribute__((always_inline)) { return add(a, b); });
}

inline float max_lane(Floats lanes) {
  return join_lanes(lanes,
                    [](Floats a, Floats b) __attribute__((always_inline)) { return max(a, b); });
}

inline int32_t max_lane(Ints lanes) {
  return join_lanes(lanes, [](Ints a, Ints b) __attribute__((always_inline)) { return max(a, b); });
}

inline int32_t sum_of_lanes(Ints lanes) {
  return join_lanes(lanes, [](Ints a, Ints b) __attribute__((always_inline)) { return add(a, b); });
}

// exp by x = n ln2 + r, |r| <= ln2/2, Taylor to degree 7 (relative error below 2^-26 before
// rounding). Below -104 the result is 0, above 88.8 infinity; NaN stays NaN.
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

// A group of 16 V inputs, whole. Returns the bits of its largest magnitude: magnitudes compare as
// integers, so a NaN or an infinity is simply a large one.
template <int V>
[[gnu::always_inline]] inline int32_t quantise_group(const float* x, int8_t* codes, float* scale,
                                                     int32_t* sum) {
  const Ints magnitude = splat_int(0x7fffffff);
  Floats in[V];
  Ints largest = splat_int(0);
  unroll<V>([&](auto v) __attribute__((always_inline)) {
    in[v] = load(x + v * 16);
    largest = max(largest, bit_and(bits_of(in[v]), magnitude));
  });
  const int32_t bits = max_lane(largest);
  float amax;
  __builtin_memcpy(&amax, &bits, 4);
  const bool is_zero = amax < kLeastAmax;
  *scale = is_zero ? 0.0f : amax / 127.0f;
  const Floats inverse = splat(is_zero ? 0.0f : 127.0f / amax);
  Ints total = splat_int(0);
  unroll<V>([&](auto v) __attribute__((always_inline)) {
    const Ints code = round_to_int(mul(in[v], inverse));
    store_int8(codes + v * 16, code);
    total = add(total, code);
  });
  *sum = sum_of_lanes(total);
  return bits;
}

// A row by groups of 16 V; the last may be partial, and counts as one followed by zeros.
template <int V>
bool quantise_groups(const float* x, int32_t cols, int8_t* codes, float* scales, int32_t* sums) {
  constexpr int32_t kGroup = 16 * V;
  int32_t worst = 0;
  const int32_t whole = cols / kGroup;
  for (int32_t g = 0; g < whole; ++g) {
    const int32_t bits =
        quantise_group<V>(x + g * kGroup, codes + g * kGroup, scales + g, sums + g);
    worst = bits > worst ? bits : worst;
  }
  const int32_t left = cols - whole * kGroup;
  if (left > 0) {
    float rest[kGroup] = {};
    for (int32_t i = 0; i < left; ++i) rest[i] = x[whole * kGroup + i];
    const int32_t bits =
        quantise_group<V>(rest, codes + whole * kGroup, scales + whole, sums + whole);
    worst = bits > worst ? bits : worst;
  }
  return worst < 0x7f800000;
}

// Groups of 16, 32 or 64.
inline bool quantise_row(const float* x, int32_t cols, int32_t group, int8_t* codes, float* scales,
                         int32_t* sums) {
  if (group == 16) return quantise_groups<1>(x, cols, codes, scales, sums);
  if (group == 32) return quantise_groups<2>(x, cols, codes, scales, sums);
  return quantise_groups<4>(x, cols, codes, scales, sums);
}

inline void rms_norm_row(const float* x, const float* weight, float eps, int32_t count,
                         float* out) {
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

inline bool has_nan(const float* x, int64_t count) {
  Ints largest = splat_int(0);
  map_rows(count, [&](int64_t i, int n) {
    largest = max(largest, bit_and(bits_of(load_some(x + i, n)), splat_int(0x7fffffff)));
  });
  int32_t lanes[16];
  store(lanes, largest);
  for (int32_t lane : lanes) {
    if (lane > 0x7f800000) return true;
  }
  return false;
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

inline Floats load_as(Format dtype, const unsigned char* p) {
  if (dtype == Format::F16) return load_f16(p);
  return dtype == Format::BF16 ? load_bf16(p) : load(reinterpret_cast<const float*>(p));
}

inline void widen(Format dtype, const void* source, int64_t count, float* out) {
  const unsigned char* bytes = static_cast<const unsigned char*>(source);
  const int64_t item = dtype == Format::F32 ? 4 : 2;
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    prefetch(bytes + i * item + 1024);
    store(out + i, load_as(dtype, bytes + i * item));
  }
  if (i == count) return;
  alignas(64) unsigned char rest[64] = {};
  __builtin_memcpy(rest, bytes + i * item, static_cast<size_t>((count - i) * item));
  store_part(out + i, load_as(dtype, rest), static_cast<int>(count - i));
}

inline void look_up_codes(const int8_t* table, int64_t count, uint8_t* codes) {
  const auto entries = load_table(table);
  for (int64_t i = 0; i < count; i += 64) {
    store_bytes(codes + i, look_up(entries, low_nibbles(load_bytes(codes + i))));
  }
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

}  // namespace headrace::HEADRACE_ISA
