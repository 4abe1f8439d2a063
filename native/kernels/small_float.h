// float16 and bfloat16 to float32 and back in plain integer arithmetic: exact, the same everywhere,
// rounding to nearest even. For places where speed does not matter; the kernels have vector forms.
#pragma once

#include <bit>
#include <cstdint>

namespace headrace {

inline float float_from_bf16(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

inline uint16_t bf16_from_float(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const bool is_nan = (std::bit_cast<int32_t>(value) & 0x7fffffff) > 0x7f800000;
  return static_cast<uint16_t>(is_nan ? (bits >> 16) | 0x40u : rounded);
}

inline float float_from_f16(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16;
  const uint32_t exponent = (half >> 10) & 0x1fu;
  const uint32_t mantissa = half & 0x3ffu;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent == 0) {
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
  }
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

// The same for finite numbers, without branches, so that a loop over it is compiled to vectors. Of
// others infinities.
inline float float_from_finite_f16(uint16_t half) {
  const float magnitude = std::bit_cast<float>((half & 0x7fffu) << 13) * 0x1p112f;
  const uint32_t is_special = (half & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | is_special |
                              (half & 0x8000u) << 16);
}

// Without branches, so that a loop over it is compiled to vectors.
inline uint16_t f16_from_float(float value) {
  const auto bits = std::bit_cast<int32_t>(value);
  const int32_t magnitude = bits & 0x7fffffff;
  // Adding one half makes the hardware round at the last place of a subnormal result.
  const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
  const int32_t subnormal = std::bit_cast<int32_t>(shifted) - 0x3f000000;
  const int32_t normal = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  int32_t half = magnitude < 0x38800000 ? subnormal : normal;
  half = magnitude >= 0x477ff000 ? 0x7c00 : half;  // rounds to infinity
  half = magnitude > 0x7f800000 ? 0x7e00 : half;   // NaN
  return static_cast<uint16_t>(half | ((bits >> 16) & 0x8000));
}

// An e4m3 number without infinities (OCP 8-bit floating point, E4M3) as float16 bits that stand for
// a 256th of it: exponents are biased by 15 there and by 7 here, and subnormal numbers agree.
inline uint16_t f16_from_e4m3(uint8_t bits) {
  return static_cast<uint16_t>((bits & 0x80u) << 8 | (bits & 0x7fu) << 7);
}

// Twice the e2m1 values, as formats and kernels of plain integers use them with half the scale.
inline constexpr int8_t kDoubledE2m1[16] = {0, 1,  2,  3,  4,  6,  8,  12,
                                            0, -1, -2, -3, -4, -6, -8, -12};

// The real weight of an e4m3 code: rounded once as long as 256 scales are a finite number.
inline float e4m3_times(uint8_t bits, float scale) {
  return float_from_f16(f16_from_e4m3(bits)) * (scale * 256.0f);
}

}  // namespace headrace
