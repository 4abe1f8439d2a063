// Sixteen lanes in one 512-bit register, AVX-512 F/BW/VL/DQ/VNNI.
#pragma once

// GCC 12's own header reads its "undefined" registers; the warnings are about that.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "kernels/wide_run.h"

namespace headrace::HEADRACE_ISA {

using Floats = __m512;
struct Ints {
  __m512i v;
};
struct Bytes {
  __m512i v;
};

inline __mmask16 first(int n) { return static_cast<__mmask16>((1u << n) - 1u); }

inline Floats splat(float x) { return _mm512_set1_ps(x); }
inline Floats load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, Floats a) { _mm512_storeu_ps(p, a); }
inline Floats load_part(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
inline void store_part(float* p, Floats a, int n) { _mm512_mask_storeu_ps(p, first(n), a); }
inline Floats load_f16(const void* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
}
inline Floats load_bf16(const void* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
// A 256th of sixteen e4m3 numbers, as float16: sign and magnitude, the latter seven bits up.
inline Floats load_e4m3(const void* p) {
  const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(static_cast<const __m128i*>(p)));
  return _mm512_cvtph_ps(
      _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(static_cast<short>(0xbfff))));
}
inline Floats load_int8(const void* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p))));
}

inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
inline Floats fma(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
inline Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }

// Lane i and lane i ^ distance change places.
template <int distance>
Floats swap_lanes(Floats a) {
  if constexpr (distance == 8) return _mm512_shuffle_f32x4(a, a, 0x4e);
  if constexpr (distance == 4) return _mm512_shuffle_f32x4(a, a, 0xb1);
  return _mm512_permute_ps(a, distance == 2 ? 0x4e : 0xb1);
}
inline float first_lane(Floats a) { return _mm512_cvtss_f32(a); }

inline Ints bits_of(Floats a) { return {_mm512_castps_si512(a)}; }
inline Floats from_bits(Ints a) { return _mm512_castsi512_ps(a.v); }
inline Ints splat_int(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline Ints add(Ints a, Ints b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline Ints sub(Ints a, Ints b) { return {_mm512_sub_epi32(a.v, b.v)}; }
inline Ints bit_and(Ints a, Ints b) { return {_mm512_and_si512(a.v, b.v)}; }
inline Ints max(Ints a, Ints b) { return {_mm512_max_epi32(a.v, b.v)}; }
template <int n>
Ints shift_left(Ints a) {
  return {_mm512_slli_epi32(a.v, n)};
}
template <int n>
Ints shift_right(Ints a) {
  return {_mm512_srai_epi32(a.v, n)};
}
inline Floats to_float(Ints a) { return _mm512_cvtepi32_ps(a.v); }
inline Ints round_to_int(Floats a) { return {_mm512_cvtps_epi32(a)}; }
inline void store(int32_t* p, Ints a) { _mm512_storeu_si512(p, a.v); }
inline void store_int8(int8_t* p, Ints a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a.v));
}

inline Bytes load_bytes(const void* p) { return {_mm512_loadu_si512(p)}; }
inline void store_bytes(void* p, Bytes a) { _mm512_storeu_si512(p, a.v); }
inline Bytes low_nibbles(Bytes a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
inline Bytes high_nibbles(Bytes a) {
  return {_mm512_and_si512(_mm512_srli_epi16(a.v, 4), _mm512_set1_epi8(15))};
}
// The high nibbles times 1 << kHighShift. 240 * 127 * 4 products of a dot are far from its 32 bits,
// so that it can do without a shift for each vector.
inline constexpr int kHighShift = 4;
inline Bytes raised_high_nibbles(Bytes a) {
  return {_mm512_and_si512(a.v, _mm512_set1_epi8(static_cast<char>(0xf0)))};
}
// Bit `from` of each byte at bit `to`, and its neighbours likewise, some from the next byte.
template <int from, int to>
__m512i shifted(__m512i x) {
  if constexpr (from > to) return _mm512_srli_epi16(x, from - to);
  if constexpr (from < to) return _mm512_slli_epi16(x, to - from);
  return x;
}
// Bits [from, from + bits) of each byte, at bit `to`.
template <int from, int to, int bits>
Bytes move_bits(Bytes x) {
  const __m512i mask = _mm512_set1_epi8(static_cast<char>(((1 << bits) - 1) << to));
  return {_mm512_and_si512(shifted<from, to>(x.v), mask)};
}
// The same of `high`, joined with the bits of `low`, which has none there.
template <int from, int to, int bits>
Bytes join_bits(Bytes low, Bytes high) {
  const __m512i mask = _mm512_set1_epi8(static_cast<char>(((1 << bits) - 1) << to));
  // low | (high & mask), in one instruction.
  return {_mm512_ternarylogic_epi64(low.v, shifted<from, to>(high.v), mask, 0xf8)};
}

// Whether a vector of lanes is one register or a few.
inline constexpr bool kLanesInRegisters = true;

// Blocks that one row is multiplied with at once.
inline constexpr int kStreams = 2;

// Accumulators of products of floats that stay in registers: half of the 32 there are.
inline constexpr int kFloatTile = 16;

// Rows of a tile of products: their sums and their dots of one group, beside two vectors of
// weights.
inline constexpr int kTileRowsMost = 8;
// The same where bits of codes lie apart.
inline constexpr int kSuperRowsMost = kTileRowsMost;

// vpdpbusd takes unsigned weights: q8 codes get 128 added by flipping their top bit.
inline constexpr int kQ8Offset = 128;
inline Bytes q8_weights(Bytes codes) {
  return {_mm512_xor_si512(codes.v, _mm512_set1_epi8(static_cast<char>(0x80)))};
}

// Entry n of sixteen bytes for each nibble n.
inline Bytes look_up(__m128i entries, Bytes nibbles) {
  return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(entries), nibbles.v)};
}
inline __m128i load_table(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }

inline constexpr int kMxfp4Offset = 12;
inline Bytes mxfp4_weights(Bytes nibbles) {
  return look_up(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0), nibbles);
}
inline Floats half_e8m0(const void* p) {
  const __m512i s = _mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
  const __m512i normal = _mm512_slli_epi32(_mm512_sub_epi32(s, _mm512_set1_epi32(1)), 23);
  const __m512i tiny = _mm512_sllv_epi32(_mm512_set1_epi32(0x00200000), s);
  const __mmask16 is_tiny = _mm512_cmplt_epi32_mask(s, _mm512_set1_epi32(2));
  return _mm512_castsi512_ps(_mm512_mask_blend_epi32(is_tiny, normal, tiny));
}

inline int32_t quad_bits(const int8_t* quad) {
  int32_t r;
  std::memcpy(&r, quad, 4);
  return r;
}
inline Ints dot_q8(Ints acc, Bytes w, const int8_t* quad) {
  return {_mm512_dpbusd_epi32(acc.v, w.v, _mm512_set1_epi32(quad_bits(quad)))};
}
template <int most>
using SmallRun = WideRun<Ints, dot_q8, 2>;

// GCC takes a function that only prefetches for one without effects, and drops calls of it that it
// has not inlined by then.
[[gnu::always_inline]] inline void prefetch(const void* p) {
  _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0);
}
// Into the second cache.
[[gnu::always_inline]] inline void prefetch_far(const void* p) {
  _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1);
}

}  // namespace headrace::HEADRACE_ISA
