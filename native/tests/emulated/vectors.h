// AVX-512 and AVX-VNNI by AVX2, for processors that lack them: each instruction that the kernels
// use gives the bits that it is defined to give. It comes before all else of a kernels_*.cpp
// (CMakeLists.txt, HEADRACE_EMULATED), whose intrinsics it replaces by name. Says nothing of speed.
#pragma once

#include <immintrin.h>

#include <bit>
#include <cstdint>
#include <cstring>

namespace headrace::emulated {

union Vector {
  __m512i ints;
  __m512 floats;
  __m256i halves[2];
  __m256 float_halves[2];
  __m128i quarters[4];
  uint8_t bytes[64];
  int32_t words[16];
  uint32_t float_words[16];
  uint64_t doubles[8];

  Vector() {}
  Vector(__m512i a) : ints(a) {}
  Vector(__m512 a) : floats(a) {}
};

template <auto op>
__m512i on_ints(__m512i a, __m512i b) {
  Vector x(a), y(b), out;
  for (int i = 0; i < 2; ++i) out.halves[i] = op(x.halves[i], y.halves[i]);
  return out.ints;
}

template <auto op>
__m512 on_floats(__m512 a, __m512 b) {
  Vector x(a), y(b), out;
  for (int i = 0; i < 2; ++i) out.float_halves[i] = op(x.float_halves[i], y.float_halves[i]);
  return out.floats;
}

template <auto op>
__m512i shift(__m512i a, int count) {
  Vector x(a);
  for (__m256i& half : x.halves) half = op(half, count);
  return x.ints;
}

// Eight lanes of each half of the source.
template <auto op>
__m512i widen(__m128i low, __m128i high) {
  Vector out;
  out.halves[0] = op(low);
  out.halves[1] = op(high);
  return out.ints;
}

inline __m512 fma(__m512 a, __m512 b, __m512 c) {
  Vector x(a), y(b), z(c);
  for (int i = 0; i < 2; ++i) {
    z.float_halves[i] = _mm256_fmadd_ps(x.float_halves[i], y.float_halves[i], z.float_halves[i]);
  }
  return z.floats;
}

inline __m512i all(__m256i half) {
  Vector out;
  out.halves[0] = out.halves[1] = half;
  return out.ints;
}
inline __m512 all(__m256 half) {
  Vector out;
  out.float_halves[0] = out.float_halves[1] = half;
  return out.floats;
}
inline __m512i all(__m128i quarter) { return all(_mm256_broadcastsi128_si256(quarter)); }

inline __m512i load(const void* p) {
  Vector out;
  std::memcpy(&out, p, 64);
  return out.ints;
}
inline void store(void* p, Vector a) { std::memcpy(p, &a, 64); }
inline const void* aligned(const void* p) {
  if (reinterpret_cast<uintptr_t>(p) % 64 != 0) __builtin_trap();  // as the processor does
  return p;
}
inline void store_aligned(void* p, Vector a) {
  aligned(p);
  store(p, a);
}
inline __m512 load_part(__mmask16 mask, const void* p) {
  Vector out;
  for (int i = 0; i < 16; ++i) {
    out.float_words[i] = 0;
    if (mask >> i & 1) std::memcpy(&out.words[i], static_cast<const char*>(p) + 4 * i, 4);
  }
  return out.floats;
}
inline void store_part(void* p, __mmask16 mask, Vector a) {
  for (int i = 0; i < 16; ++i) {
    if (mask >> i & 1) std::memcpy(static_cast<char*>(p) + 4 * i, &a.words[i], 4);
  }
}

inline __m512 from_f16(__m256i a) {
  Vector out;
  out.float_halves[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(a));
  out.float_halves[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1));
  return out.floats;
}
inline __m512 to_floats(__m512i a) {
  Vector x(a), out;
  for (int i = 0; i < 2; ++i) out.float_halves[i] = _mm256_cvtepi32_ps(x.halves[i]);
  return out.floats;
}
inline __m512i to_ints(__m512 a) {
  Vector x(a), out;
  for (int i = 0; i < 2; ++i) out.halves[i] = _mm256_cvtps_epi32(x.float_halves[i]);
  return out.ints;
}
inline __m128i low_bytes(__m512i a) {
  Vector x(a), out;
  for (int i = 0; i < 16; ++i) out.bytes[i] = static_cast<uint8_t>(x.words[i]);
  return out.quarters[0];
}

inline __m512 shuffle_quarters(__m512 a, __m512 b, int order) {
  Vector x(a), y(b), out;
  for (int i = 0; i < 4; ++i) out.quarters[i] = (i < 2 ? x : y).quarters[order >> 2 * i & 3];
  return out.floats;
}
inline __m512 permute_in_quarters(__m512 a, int order) {
  Vector x(a), out;
  for (int i = 0; i < 16; ++i) out.words[i] = x.words[(i & ~3) + (order >> 2 * (i & 3) & 3)];
  return out.floats;
}
inline __m512i permute_bytes(__m512i places, __m512i a) {
  Vector x(places), y(a), out;
  for (int i = 0; i < 64; ++i) out.bytes[i] = y.bytes[x.bytes[i] & 63];
  return out.ints;
}
// Bit n of `table` is what three bits become whose number is n.
inline __m512i look_up_bits(__m512i a, __m512i b, __m512i c, int table) {
  Vector x(a), y(b), z(c), out;
  for (int i = 0; i < 8; ++i) {
    out.doubles[i] = 0;
    for (int n = 0; n < 8; ++n) {
      if ((table >> n & 1) == 0) continue;
      out.doubles[i] |= (n & 4 ? x.doubles[i] : ~x.doubles[i]) &
                        (n & 2 ? y.doubles[i] : ~y.doubles[i]) &
                        (n & 1 ? z.doubles[i] : ~z.doubles[i]);
    }
  }
  return out.ints;
}
inline __mmask16 less(__m512i a, __m512i b) {
  Vector x(a), y(b);
  __mmask16 mask = 0;
  for (int i = 0; i < 16; ++i) mask |= static_cast<__mmask16>((x.words[i] < y.words[i]) << i);
  return mask;
}
inline __m512i choose(__mmask16 mask, __m512i a, __m512i b) {
  Vector x(a), y(b);
  for (int i = 0; i < 16; ++i) x.words[i] = mask >> i & 1 ? y.words[i] : x.words[i];
  return x.ints;
}
// Each byte times a matrix of 8 x 8 bits, whose first row is its last byte, plus a constant.
inline __m512i affine(__m512i a, __m512i matrices, int constant) {
  Vector x(a), m(matrices), out;
  for (int i = 0; i < 64; ++i) {
    int bits = 0;
    for (int bit = 0; bit < 8; ++bit) {
      const auto row = static_cast<uint8_t>(m.bytes[(i & ~7) + 7 - bit] & x.bytes[i]);
      bits |= (std::popcount(row) & 1) << bit;
    }
    out.bytes[i] = static_cast<uint8_t>(bits ^ constant);
  }
  return out.ints;
}

// Four unsigned bytes times four signed ones, added up in 32 bits: nothing saturates.
inline __m256i dot(__m256i sums, __m256i a, __m256i b) {
  const __m256i even = _mm256_madd_epi16(_mm256_and_si256(a, _mm256_set1_epi16(255)),
                                         _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8));
  const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(a, 8), _mm256_srai_epi16(b, 8));
  return _mm256_add_epi32(sums, _mm256_add_epi32(even, odd));
}
inline __m512i dot(__m512i sums, __m512i a, __m512i b) {
  Vector x(sums), y(a), z(b);
  for (int i = 0; i < 2; ++i) x.halves[i] = dot(x.halves[i], y.halves[i], z.halves[i]);
  return x.ints;
}

}  // namespace headrace::emulated

// clang-format off
#define HEADRACE_OP(op) [](auto x, auto y) { return op(x, y); }
#define HEADRACE_OF(op) [](auto x) { return op(x); }
#define HEADRACE_HALVES(a) _mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1)
#define HEADRACE_BYTES(a) a, _mm_srli_si128(a, 8)

#undef _mm512_cvtph_ps
#undef _mm512_shuffle_f32x4
#undef _mm512_permute_ps
#undef _mm512_ternarylogic_epi64
#undef _mm512_gf2p8affine_epi64_epi8
#undef _mm512_dpbusd_epi32
#undef _mm256_dpbusd_avx_epi32

#define _mm512_add_ps headrace::emulated::on_floats<HEADRACE_OP(_mm256_add_ps)>
#define _mm512_sub_ps headrace::emulated::on_floats<HEADRACE_OP(_mm256_sub_ps)>
#define _mm512_mul_ps headrace::emulated::on_floats<HEADRACE_OP(_mm256_mul_ps)>
#define _mm512_div_ps headrace::emulated::on_floats<HEADRACE_OP(_mm256_div_ps)>
#define _mm512_max_ps headrace::emulated::on_floats<HEADRACE_OP(_mm256_max_ps)>
#define _mm512_min_ps headrace::emulated::on_floats<HEADRACE_OP(_mm256_min_ps)>
#define _mm512_fmadd_ps headrace::emulated::fma
#define _mm512_add_epi32 headrace::emulated::on_ints<HEADRACE_OP(_mm256_add_epi32)>
#define _mm512_sub_epi32 headrace::emulated::on_ints<HEADRACE_OP(_mm256_sub_epi32)>
#define _mm512_sub_epi8 headrace::emulated::on_ints<HEADRACE_OP(_mm256_sub_epi8)>
#define _mm512_max_epi32 headrace::emulated::on_ints<HEADRACE_OP(_mm256_max_epi32)>
#define _mm512_and_si512 headrace::emulated::on_ints<HEADRACE_OP(_mm256_and_si256)>
#define _mm512_xor_si512 headrace::emulated::on_ints<HEADRACE_OP(_mm256_xor_si256)>
#define _mm512_sllv_epi32 headrace::emulated::on_ints<HEADRACE_OP(_mm256_sllv_epi32)>
#define _mm512_shuffle_epi8 headrace::emulated::on_ints<HEADRACE_OP(_mm256_shuffle_epi8)>
#define _mm512_slli_epi32 headrace::emulated::shift<HEADRACE_OP(_mm256_slli_epi32)>
#define _mm512_srai_epi32 headrace::emulated::shift<HEADRACE_OP(_mm256_srai_epi32)>
#define _mm512_slli_epi16 headrace::emulated::shift<HEADRACE_OP(_mm256_slli_epi16)>
#define _mm512_srli_epi16 headrace::emulated::shift<HEADRACE_OP(_mm256_srli_epi16)>
#define _mm512_ternarylogic_epi64 headrace::emulated::look_up_bits
#define _mm512_cmplt_epi32_mask headrace::emulated::less
#define _mm512_mask_blend_epi32 headrace::emulated::choose
#define _mm512_gf2p8affine_epi64_epi8 headrace::emulated::affine
#define _mm512_dpbusd_epi32 headrace::emulated::dot
#define _mm256_dpbusd_avx_epi32 headrace::emulated::dot

#define _mm512_set1_ps(x) headrace::emulated::all(_mm256_set1_ps(x))
#define _mm512_set1_epi8(x) headrace::emulated::all(_mm256_set1_epi8(x))
#define _mm512_set1_epi32(x) headrace::emulated::all(_mm256_set1_epi32(x))
#define _mm512_set1_epi64(x) headrace::emulated::all(_mm256_set1_epi64x(x))
#define _mm512_broadcast_i32x4(x) headrace::emulated::all(x)
#define _mm512_shuffle_f32x4 headrace::emulated::shuffle_quarters
#define _mm512_permute_ps headrace::emulated::permute_in_quarters
#define _mm512_permutexvar_epi8 headrace::emulated::permute_bytes

#define _mm512_castps_si512(a) headrace::emulated::Vector(a).ints
#define _mm512_castsi512_ps(a) headrace::emulated::Vector(a).floats
#define _mm512_cvtss_f32(a) _mm256_cvtss_f32(headrace::emulated::Vector(a).float_halves[0])
#define _mm512_cvtph_ps headrace::emulated::from_f16
#define _mm512_cvtepi32_ps headrace::emulated::to_floats
#define _mm512_cvtps_epi32 headrace::emulated::to_ints
#define _mm512_cvtepi32_epi8 headrace::emulated::low_bytes
#define _mm512_cvtepu16_epi32(a) headrace::emulated::widen<HEADRACE_OF(_mm256_cvtepu16_epi32)>(HEADRACE_HALVES(a))
#define _mm512_cvtepi8_epi32(a) headrace::emulated::widen<HEADRACE_OF(_mm256_cvtepi8_epi32)>(HEADRACE_BYTES(a))
#define _mm512_cvtepu8_epi32(a) headrace::emulated::widen<HEADRACE_OF(_mm256_cvtepu8_epi32)>(HEADRACE_BYTES(a))

#define _mm512_loadu_si512 headrace::emulated::load
#define _mm512_loadu_ps(p) headrace::emulated::Vector(headrace::emulated::load(p)).floats
#define _mm512_storeu_si512 headrace::emulated::store
#define _mm512_storeu_ps headrace::emulated::store
#define _mm512_load_si512(p) headrace::emulated::load(headrace::emulated::aligned(p))
#define _mm512_store_si512 headrace::emulated::store_aligned
#define _mm512_maskz_loadu_ps headrace::emulated::load_part
#define _mm512_mask_storeu_ps headrace::emulated::store_part
// clang-format on

// After the compiler's header, which asks for them as well.
#define __AVX512VNNI__ 1
#define __AVXVNNI__ 1
#define __AMX_INT8__ 1
