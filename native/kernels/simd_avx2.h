// Sixteen lanes in two 256-bit registers, AVX2 with FMA and F16C, and AVX-VNNI where it is built
// for.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/wide_run.h"

namespace headrace::HEADRACE_ISA {

struct Floats {
  __m256 a, b;
};
struct Ints {
  __m256i a, b;
};
struct Bytes {
  __m256i a, b;
};

inline __m256i first(int n, int from) {
  const __m256i lanes =
      _mm256_add_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(from));
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), lanes);
}

inline Floats splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Floats load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, Floats x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
inline Floats load_part(const float* p, int n) {
  return {_mm256_maskload_ps(p, first(n, 0)), _mm256_maskload_ps(p + 8, first(n, 8))};
}
inline void store_part(float* p, Floats x, int n) {
  _mm256_maskstore_ps(p, first(n, 0), x.a);
  _mm256_maskstore_ps(p + 8, first(n, 8), x.b);
}
inline __m128i half_at(const void* p, int i) {
  return _mm_loadu_si128(static_cast<const __m128i*>(p) + i);
}
inline Floats load_f16(const void* p) {
  return {_mm256_cvtph_ps(half_at(p, 0)), _mm256_cvtph_ps(half_at(p, 1))};
}
inline __m256 widen_bf16(__m128i x) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
}
inline Floats load_bf16(const void* p) {
  return {widen_bf16(half_at(p, 0)), widen_bf16(half_at(p, 1))};
}
// A 256th of sixteen e4m3 numbers, as float16: sign and magnitude, the latter seven bits up.
inline Floats load_e4m3(const void* p) {
  const __m256i wide = _mm256_cvtepi8_epi16(half_at(p, 0));
  const __m256i halves =
      _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(static_cast<short>(0xbfff)));
  return {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)),
          _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
}
inline Floats load_int8(const void* p) {
  const __m128i codes = half_at(p, 0);
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes)),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(codes, 8)))};
}

inline Floats add(Floats x, Floats y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline Floats sub(Floats x, Floats y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline Floats mul(Floats x, Floats y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline Floats div(Floats x, Floats y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline Floats fma(Floats x, Floats y, Floats z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
inline Floats max(Floats x, Floats y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline Floats min(Floats x, Floats y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }

// Lane i and lane i ^ distance change places.
template <int distance>
Floats swap_lanes(Floats x) {
  if constexpr (distance == 8) return {x.b, x.a};
  if constexpr (distance == 4) {
    return {_mm256_permute2f128_ps(x.a, x.a, 1), _mm256_permute2f128_ps(x.b, x.b, 1)};
  }
  constexpr int order = distance == 2 ? 0x4e : 0xb1;
  return {_mm256_permute_ps(x.a, order), _mm256_permute_ps(x.b, order)};
}
inline float first_lane(Floats x) { return _mm256_cvtss_f32(x.a); }

inline Ints bits_of(Floats x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
inline Floats from_bits(Ints x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
inline Ints splat_int(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline Ints add(Ints x, Ints y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline Ints sub(Ints x, Ints y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
inline Ints bit_and(Ints x, Ints y) {
  return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)};
}
inline Ints max(Ints x, Ints y) { return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)}; }
template <int n>
Ints shift_left(Ints x) {
  return {_mm256_slli_epi32(x.a, n), _mm256_slli_epi32(x.b, n)};
}
template <int n>
Ints shift_right(Ints x) {
  return {_mm256_srai_epi32(x.a, n), _mm256_srai_epi32(x.b, n)};
}
inline Floats to_float(Ints x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline Ints round_to_int(Floats x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
inline void store(int32_t* p, Ints x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.a);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), x.b);
}
inline void store_int8(int8_t* p, Ints x) {
  // Packing works within 128-bit halves; the permutation puts the eight quarters back in order.
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xd8);
  const __m128i bytes =
      _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}

inline Bytes load_bytes(const void* p) {
  const __m256i* q = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
inline Bytes low_nibbles(Bytes x) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask)};
}
inline Bytes high_nibbles(Bytes x) {
  return low_nibbles({_mm256_srli_epi16(x.a, 4), _mm256_srli_epi16(x.b, 4)});
}
// The high nibbles times 1 << kHighShift: none here, the sums of a dot's pairs have 16 bits.
inline constexpr int kHighShift = 0;
inline Bytes raised_high_nibbles(Bytes x) { return high_nibbles(x); }
inline void store_bytes(void* p, Bytes x) {
  __m256i* q = static_cast<__m256i*>(p);
  _mm256_storeu_si256(q, x.a);
  _mm256_storeu_si256(q + 1, x.b);
}
// Bits [from, from + bits) of each byte, at bit `to`.
template <int from, int to, int bits>
Bytes move_bits(Bytes x) {
  const __m256i mask = _mm256_set1_epi8(static_cast<char>(((1 << bits) - 1) << to));
  const auto moved = [&](__m256i half) {
    if constexpr (from > to) half = _mm256_srli_epi16(half, from - to);
    if constexpr (from < to) half = _mm256_slli_epi16(half, to - from);
    return _mm256_and_si256(half, mask);
  };
  return {moved(x.a), moved(x.b)};
}
// The same of `high`, joined with the bits of `low`, which has none there.
template <int from, int to, int bits>
Bytes join_bits(Bytes low, Bytes high) {
  const Bytes moved = move_bits<from, to, bits>(high);
  return {_mm256_or_si256(low.a, moved.a), _mm256_or_si256(low.b, moved.b)};
}

// Whether a vector of lanes is one register or a few.
inline constexpr bool kLanesInRegisters = true;

// Blocks that one row is multiplied with at once.
inline constexpr int kStreams = 2;

// Accumulators of products of floats that stay in registers: eight of the sixteen there are.
inline constexpr int kFloatTile = 4;

// Rows of a tile of products: eight of the sixteen registers are their dots of one group.
inline constexpr int kTileRowsMost = 4;
// The same where bits of codes lie apart.
inline constexpr int kSuperRowsMost = kTileRowsMost;

#if defined(__AVXVNNI__)
// As in simd_avx512.h.
inline constexpr int kQ8Offset = 128;
inline Bytes q8_weights(Bytes codes) {
  const __m256i top = _mm256_set1_epi8(static_cast<char>(0x80));
  return {_mm256_xor_si256(codes.a, top), _mm256_xor_si256(codes.b, top)};
}
#else
inline constexpr int kQ8Offset = 0;
inline Bytes q8_weights(Bytes codes) { return codes; }
#endif

// Entry n of sixteen bytes for each nibble n.
inline Bytes look_up(__m128i entries, Bytes nibbles) {
  const __m256i table = _mm256_broadcastsi128_si256(entries);
  return {_mm256_shuffle_epi8(table, nibbles.a), _mm256_shuffle_epi8(table, nibbles.b)};
}
inline __m128i load_table(const void* p) { return half_at(p, 0); }

inline constexpr int kMxfp4Offset = 12;
inline Bytes mxfp4_weights(Bytes nibbles) {
  return look_up(_mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0), nibbles);
}
inline __m256 half_e8m0_of(__m256i s) {
  const __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(s, _mm256_set1_epi32(1)), 23);
  const __m256i tiny = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), s);
  const __m256i is_tiny = _mm256_cmpgt_epi32(_mm256_set1_epi32(2), s);
  return _mm256_castsi256_ps(_mm256_blendv_epi8(normal, tiny, is_tiny));
}
inline Floats half_e8m0(const void* p) {
  const __m128i s = half_at(p, 0);
  return {half_e8m0_of(_mm256_cvtepu8_epi32(s)),
          half_e8m0_of(_mm256_cvtepu8_epi32(_mm_srli_si128(s, 8)))};
}

inline int32_t quad_bits(const int8_t* quad) {
  int32_t r;
  std::memcpy(&r, quad, 4);
  return r;
}
#if defined(__AVXVNNI__)
inline Ints dot_q8(Ints acc, Bytes w, const int8_t* quad) {
  const __m256i x = _mm256_set1_epi32(quad_bits(quad));
  return {_mm256_dpbusd_avx_epi32(acc.a, w.a, x), _mm256_dpbusd_avx_epi32(acc.b, w.b, x)};
}
template <int most>
using SmallRun = WideRun<Ints, dot_q8, 2>;
#else
// A sum that is made where it is written. GCC is free to reorder sums of integers: it would keep
// all products of a group, in memory, and add them at its end.
inline __m256i added(__m256i sum) {
#if defined(__GNUC__)
  asm("" : "+x"(sum));
#endif
  return sum;
}
// The products of a quad, added in pairs of 16 bits, without saturating: 128 * 127 * 2 = 32512 for
// q8, whose sign moves to the activation (|-128| is 128 as an unsigned byte).
inline __m256i pairs_of(__m256i weight, __m256i activation) {
  return _mm256_maddubs_epi16(weight, activation);
}
inline __m256i add_pairs(__m256i acc, __m256i pairs) {
  return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
inline Ints dot_q8(Ints acc, Bytes w, const int8_t* quad) {
  const __m256i x = _mm256_set1_epi32(quad_bits(quad));
  return {add_pairs(acc.a, pairs_of(_mm256_abs_epi8(w.a), _mm256_sign_epi8(x, w.a))),
          add_pairs(acc.b, pairs_of(_mm256_abs_epi8(w.b), _mm256_sign_epi8(x, w.b)))};
}
inline Ints dot_small(Ints acc, Bytes w, const int8_t* quad) {
  const __m256i x = _mm256_set1_epi32(quad_bits(quad));
  return {added(add_pairs(acc.a, pairs_of(w.a, x))), added(add_pairs(acc.b, pairs_of(w.b, x)))};
}
// Dots of weights from 0 to 15, of which the pairs of eight quads fit 16 bits, 8 * 15 * 127 * 2 =
// 30480: a multiplication less for each quad.
struct NarrowRun {
  static constexpr int kQuads = 8;
  static constexpr bool kNarrow = true;
  __m256i a, b;

  void start(Ints) { a = b = _mm256_setzero_si256(); }
  void add(Bytes w, const int8_t* quad) {
    const __m256i x = _mm256_set1_epi32(quad_bits(quad));
    a = added(_mm256_add_epi16(a, pairs_of(w.a, x)));
    b = added(_mm256_add_epi16(b, pairs_of(w.b, x)));
  }
  Ints sum(Ints before) const { return {add_pairs(before.a, a), add_pairs(before.b, b)}; }
};
// Of larger weights four or fewer quads fit, which gained nothing.
template <int most>
using SmallRun = std::conditional_t<(most <= 15), NarrowRun, WideRun<Ints, dot_small, 2> >;
#endif

// As in simd_avx512.h, must be inlined.
[[gnu::always_inline]] inline void prefetch(const void* p) {
  _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0);
}
// Into the second cache.
[[gnu::always_inline]] inline void prefetch_far(const void* p) {
  _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1);
}

}  // namespace headrace::HEADRACE_ISA
