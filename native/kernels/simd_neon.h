// Sixteen lanes in four 128-bit registers, NEON of AArch64 with the dot-product extension.
#pragma once

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

#include "kernels/wide_run.h"

namespace headrace::HEADRACE_ISA {

struct Floats {
  float32x4_t a, b, c, d;
};
struct Ints {
  int32x4_t a, b, c, d;
};
struct Bytes {
  int8x16_t a, b, c, d;
};

// One instruction on each of the four registers.
template <class To, class F, class... From>
To each(F f, From... x) {
  return {f(x.a...), f(x.b...), f(x.c...), f(x.d...)};
}

inline Floats splat(float x) {
  const float32x4_t v = vdupq_n_f32(x);
  return {v, v, v, v};
}
inline Floats load(const float* p) {
  return {vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)};
}
inline void store(float* p, Floats x) {
  vst1q_f32(p, x.a);
  vst1q_f32(p + 4, x.b);
  vst1q_f32(p + 8, x.c);
  vst1q_f32(p + 12, x.d);
}
// Four lanes from `from` on, of which those below n are in memory. AArch64 has no masked loads.
inline float32x4_t quarter(const float* p, int n, int from) {
  if (n - from >= 4) return vld1q_f32(p + from);
  float32x4_t v = vdupq_n_f32(0.0f);
  if (n - from > 0) v = vld1q_lane_f32(p + from, v, 0);
  if (n - from > 1) v = vld1q_lane_f32(p + from + 1, v, 1);
  if (n - from > 2) v = vld1q_lane_f32(p + from + 2, v, 2);
  return v;
}
inline void store_quarter(float* p, float32x4_t x, int n, int from) {
  if (n - from >= 4) return vst1q_f32(p + from, x);
  if (n - from > 0) vst1q_lane_f32(p + from, x, 0);
  if (n - from > 1) vst1q_lane_f32(p + from + 1, x, 1);
  if (n - from > 2) vst1q_lane_f32(p + from + 2, x, 2);
}
inline Floats load_part(const float* p, int n) {
  return {quarter(p, n, 0), quarter(p, n, 4), quarter(p, n, 8), quarter(p, n, 12)};
}
inline void store_part(float* p, Floats x, int n) {
  store_quarter(p, x.a, n, 0);
  store_quarter(p, x.b, n, 4);
  store_quarter(p, x.c, n, 8);
  store_quarter(p, x.d, n, 12);
}
inline uint16x8_t halves_at(const void* p, int i) {
  return vreinterpretq_u16_u8(vld1q_u8(static_cast<const uint8_t*>(p) + 16 * i));
}
inline Floats load_f16(const void* p) {
  const float16x8_t low = vreinterpretq_f16_u16(halves_at(p, 0));
  const float16x8_t high = vreinterpretq_f16_u16(halves_at(p, 1));
  return {vcvt_f32_f16(vget_low_f16(low)), vcvt_high_f32_f16(low), vcvt_f32_f16(vget_low_f16(high)),
          vcvt_high_f32_f16(high)};
}
inline Floats load_bf16(const void* p) {
  const auto low = [](uint16x8_t x) {
    return vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(x), 16));
  };
  const auto high = [](uint16x8_t x) { return vreinterpretq_f32_u32(vshll_high_n_u16(x, 16)); };
  return {low(halves_at(p, 0)), high(halves_at(p, 0)), low(halves_at(p, 1)), high(halves_at(p, 1))};
}
// A 256th of sixteen e4m3 numbers, as float16: sign and magnitude, the latter seven bits up.
inline Floats load_e4m3(const void* p) {
  const int8x16_t codes = vld1q_s8(static_cast<const int8_t*>(p));
  const auto halves = [](int16x8_t wide) {
    const uint16x8_t shifted = vreinterpretq_u16_s16(vshlq_n_s16(wide, 7));
    return vreinterpretq_f16_u16(vandq_u16(shifted, vdupq_n_u16(0xbfff)));
  };
  const float16x8_t low = halves(vmovl_s8(vget_low_s8(codes)));
  const float16x8_t high = halves(vmovl_high_s8(codes));
  return {vcvt_f32_f16(vget_low_f16(low)), vcvt_high_f32_f16(low), vcvt_f32_f16(vget_low_f16(high)),
          vcvt_high_f32_f16(high)};
}
inline Floats load_int8(const void* p) {
  const int8x16_t codes = vld1q_s8(static_cast<const int8_t*>(p));
  const int16x8_t low = vmovl_s8(vget_low_s8(codes));
  const int16x8_t high = vmovl_high_s8(codes);
  return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_high_s16(low)),
          vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_high_s16(high))};
}

inline Floats add(Floats x, Floats y) {
  return each<Floats>([](float32x4_t u, float32x4_t v) { return vaddq_f32(u, v); }, x, y);
}
inline Floats sub(Floats x, Floats y) {
  return each<Floats>([](float32x4_t u, float32x4_t v) { return vsubq_f32(u, v); }, x, y);
}
inline Floats mul(Floats x, Floats y) {
  return each<Floats>([](float32x4_t u, float32x4_t v) { return vmulq_f32(u, v); }, x, y);
}
inline Floats div(Floats x, Floats y) {
  return each<Floats>([](float32x4_t u, float32x4_t v) { return vdivq_f32(u, v); }, x, y);
}
inline Floats fma(Floats x, Floats y, Floats z) {
  return each<Floats>(
      [](float32x4_t u, float32x4_t v, float32x4_t w) { return vfmaq_f32(w, u, v); }, x, y, z);
}
// FMAX orders zeros and returns NaN for either operand; the contract is the x86 rule, the second
// argument where the two do not compare or are equal. So: compare and select.
inline Floats max(Floats x, Floats y) {
  return each<Floats>([](float32x4_t u, float32x4_t v) { return vbslq_f32(vcgtq_f32(u, v), u, v); },
                      x, y);
}
inline Floats min(Floats x, Floats y) {
  return each<Floats>([](float32x4_t u, float32x4_t v) { return vbslq_f32(vcltq_f32(u, v), u, v); },
                      x, y);
}

// Lane i and lane i ^ distance change places.
template <int distance>
Floats swap_lanes(Floats x) {
  if constexpr (distance == 8) return {x.c, x.d, x.a, x.b};
  if constexpr (distance == 4) return {x.b, x.a, x.d, x.c};
  if constexpr (distance == 2) {
    return {vextq_f32(x.a, x.a, 2), vextq_f32(x.b, x.b, 2), vextq_f32(x.c, x.c, 2),
            vextq_f32(x.d, x.d, 2)};
  }
  return {vrev64q_f32(x.a), vrev64q_f32(x.b), vrev64q_f32(x.c), vrev64q_f32(x.d)};
}
inline float first_lane(Floats x) { return vgetq_lane_f32(x.a, 0); }

inline Ints bits_of(Floats x) {
  return each<Ints>([](float32x4_t u) { return vreinterpretq_s32_f32(u); }, x);
}
inline Floats from_bits(Ints x) {
  return each<Floats>([](int32x4_t u) { return vreinterpretq_f32_s32(u); }, x);
}
inline Ints splat_int(int32_t x) {
  const int32x4_t v = vdupq_n_s32(x);
  return {v, v, v, v};
}
inline Ints add(Ints x, Ints y) {
  return each<Ints>([](int32x4_t u, int32x4_t v) { return vaddq_s32(u, v); }, x, y);
}
inline Ints sub(Ints x, Ints y) {
  return each<Ints>([](int32x4_t u, int32x4_t v) { return vsubq_s32(u, v); }, x, y);
}
inline Ints bit_and(Ints x, Ints y) {
  return each<Ints>([](int32x4_t u, int32x4_t v) { return vandq_s32(u, v); }, x, y);
}
inline Ints max(Ints x, Ints y) {
  return each<Ints>([](int32x4_t u, int32x4_t v) { return vmaxq_s32(u, v); }, x, y);
}
template <int n>
Ints shift_left(Ints x) {
  return each<Ints>([](int32x4_t u) { return vshlq_n_s32(u, n); }, x);
}
template <int n>
Ints shift_right(Ints x) {
  return each<Ints>([](int32x4_t u) { return vshrq_n_s32(u, n); }, x);
}
inline Floats to_float(Ints x) {
  return each<Floats>([](int32x4_t u) { return vcvtq_f32_s32(u); }, x);
}
inline Ints round_to_int(Floats x) {
  return each<Ints>([](float32x4_t u) { return vcvtnq_s32_f32(u); }, x);
}
inline void store(int32_t* p, Ints x) {
  vst1q_s32(p, x.a);
  vst1q_s32(p + 4, x.b);
  vst1q_s32(p + 8, x.c);
  vst1q_s32(p + 12, x.d);
}
inline void store_int8(int8_t* p, Ints x) {
  const int16x8_t low = vmovn_high_s32(vmovn_s32(x.a), x.b);
  const int16x8_t high = vmovn_high_s32(vmovn_s32(x.c), x.d);
  vst1q_s8(p, vmovn_high_s16(vmovn_s16(low), high));
}

inline Bytes load_bytes(const void* p) {
  const int8_t* q = static_cast<const int8_t*>(p);
  return {vld1q_s8(q), vld1q_s8(q + 16), vld1q_s8(q + 32), vld1q_s8(q + 48)};
}
inline void store_bytes(void* p, Bytes x) {
  int8_t* q = static_cast<int8_t*>(p);
  vst1q_s8(q, x.a);
  vst1q_s8(q + 16, x.b);
  vst1q_s8(q + 32, x.c);
  vst1q_s8(q + 48, x.d);
}
inline Bytes low_nibbles(Bytes x) {
  return each<Bytes>([](int8x16_t u) { return vandq_s8(u, vdupq_n_s8(15)); }, x);
}
inline Bytes high_nibbles(Bytes x) {
  return each<Bytes>(
      [](int8x16_t u) { return vreinterpretq_s8_u8(vshrq_n_u8(vreinterpretq_u8_s8(u), 4)); }, x);
}
// The high nibbles times 1 << kHighShift: none here, SDOT multiplies signed by signed.
inline constexpr int kHighShift = 0;
inline Bytes raised_high_nibbles(Bytes x) { return high_nibbles(x); }
// Bits [from, from + bits) of each byte, at bit `to`.
template <int from, int to, int bits>
Bytes move_bits(Bytes x) {
  return each<Bytes>(
      [](int8x16_t u) {
        uint8x16_t v = vreinterpretq_u8_s8(u);
        if constexpr (from > to) v = vshrq_n_u8(v, from - to);
        if constexpr (from < to) v = vshlq_n_u8(v, to - from);
        return vreinterpretq_s8_u8(vandq_u8(v, vdupq_n_u8(((1 << bits) - 1) << to)));
      },
      x);
}
// The same of `high`, joined with the bits of `low`, which has none there.
template <int from, int to, int bits>
Bytes join_bits(Bytes low, Bytes high) {
  return each<Bytes>([](int8x16_t u, int8x16_t v) { return vorrq_s8(u, v); }, low,
                     move_bits<from, to, bits>(high));
}

// Whether a vector of lanes is one register or a few.
inline constexpr bool kLanesInRegisters = true;

// Blocks that one row is multiplied with at once.
inline constexpr int kStreams = 1;

// Accumulators of products of floats that stay in registers: sixteen of the 32 there are.
inline constexpr int kFloatTile = 4;

// Rows of a tile of products: their dots of one group take half the registers.
inline constexpr int kTileRowsMost = 4;
// The same where bits of codes lie apart.
inline constexpr int kSuperRowsMost = kTileRowsMost;

// SDOT multiplies signed by signed, so no format needs an offset but q4, whose nibbles hold one.
inline constexpr int kQ8Offset = 0;
inline Bytes q8_weights(Bytes codes) { return codes; }

// Entry n of sixteen bytes for each nibble n.
inline Bytes look_up(int8x16_t table, Bytes nibbles) {
  return each<Bytes>([&](int8x16_t u) { return vqtbl1q_s8(table, vreinterpretq_u8_s8(u)); },
                     nibbles);
}
inline int8x16_t load_table(const void* p) { return vld1q_s8(static_cast<const int8_t*>(p)); }

inline constexpr int kMxfp4Offset = 0;
inline Bytes mxfp4_weights(Bytes nibbles) {
  constexpr int8_t values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
  return look_up(load_table(values), nibbles);
}
inline float32x4_t half_e8m0_of(uint16x4_t bytes) {
  const int32x4_t s = vreinterpretq_s32_u32(vmovl_u16(bytes));
  const int32x4_t normal = vshlq_n_s32(vsubq_s32(s, vdupq_n_s32(1)), 23);
  const int32x4_t tiny = vshlq_s32(vdupq_n_s32(0x00200000), s);
  const uint32x4_t is_tiny = vcltq_s32(s, vdupq_n_s32(2));
  return vreinterpretq_f32_s32(vbslq_s32(is_tiny, tiny, normal));
}
inline Floats half_e8m0(const void* p) {
  const uint8x16_t s = vld1q_u8(static_cast<const uint8_t*>(p));
  const uint16x8_t low = vmovl_u8(vget_low_u8(s));
  const uint16x8_t high = vmovl_high_u8(s);
  return {half_e8m0_of(vget_low_u16(low)), half_e8m0_of(vget_high_u16(low)),
          half_e8m0_of(vget_low_u16(high)), half_e8m0_of(vget_high_u16(high))};
}

inline int32_t quad_bits(const int8_t* quad) {
  int32_t r;
  std::memcpy(&r, quad, 4);
  return r;
}
inline Ints dot_q8(Ints acc, Bytes w, const int8_t* quad) {
  const int8x16_t x = vreinterpretq_s8_s32(vdupq_n_s32(quad_bits(quad)));
  return each<Ints>([&](int32x4_t sum, int8x16_t u) { return vdotq_s32(sum, u, x); }, acc, w);
}
template <int most>
using SmallRun = WideRun<Ints, dot_q8, 2>;

// As in simd_avx512.h, must be inlined.
[[gnu::always_inline]] inline void prefetch(const void* p) { __builtin_prefetch(p); }
// Into the second cache.
[[gnu::always_inline]] inline void prefetch_far(const void* p) { __builtin_prefetch(p, 0, 2); }

}  // namespace headrace::HEADRACE_ISA
