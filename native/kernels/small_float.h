// float16 and bfloat16 to float32 and back in plain integer arithmetic: exact, the same everywhere,
// rounding to nearest even. For places where speed does not matter; the kernels have vector forms.
#pragma once

#include <bit>
#include <cstdint>

namespace headrace {

inline float float_from_bf16(uint16_t bits) { return std::bit_cast<float>(uint32_t{bits} << 16); }

inline uint16_t bf16_from_float(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u)
    return static_cast<uint16_t>((bits >> 16) | 0x40u);  // NaN
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
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

inline uint16_t f16_from_float(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | 0x7e00u;   // NaN
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // rounds to infinity
  if (magnitude < 0x38800000u) {                        // subnormal result
    // Adding 2^-1 * 2^... lets the hardware round at the half's last place, to nearest even.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return sign | static_cast<uint16_t>(std::bit_cast<uint32_t>(shifted) - 0x3f000000u);
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return sign | static_cast<uint16_t>((rounded - 0x38000000u) >> 13);
}

// An e4m3 number without infinities (OCP 8-bit floating point, E4M3) as float16 bits that stand for
// a 256th of it: exponents are biased by 15 there and by 7 here, and subnormal numbers agree.
inline uint16_t f16_from_e4m3(uint8_t bits) {
  return static_cast<uint16_t>((bits & 0x80u) << 8 | (bits & 0x7fu) << 7);
}

// The real weight of an e4m3 code: rounded once as long as 256 scales are a finite number.
inline float e4m3_times(uint8_t bits, float scale) {
  return float_from_f16(f16_from_e4m3(bits)) * (scale * 256.0f);
}

}  // namespace headrace
