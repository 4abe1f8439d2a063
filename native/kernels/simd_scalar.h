// Sixteen lanes in plain C++: the specification that the vector versions equal bit for bit.
// Included by one translation unit, which sets HEADRACE_ISA to its own namespace.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/small_float.h"
#include "kernels/wide_run.h"

namespace headrace::HEADRACE_ISA {

struct Floats {
  float lane[16];
};
struct Ints {
  int32_t lane[16];
};
struct Bytes {
  uint8_t byte[64];
};  // 16 outputs of 4 codes

#define HEADRACE_LANES for (int i = 0; i < 16; ++i)

inline Floats splat(float x) {
  Floats r;
  HEADRACE_LANES r.lane[i] = x;
  return r;
}
inline Floats load(const float* p) {
  Floats r;
  std::memcpy(&r, p, 64);
  return r;
}
inline void store(float* p, Floats a) { std::memcpy(p, &a, 64); }
inline Floats load_part(const float* p, int n) {
  Floats r;
  HEADRACE_LANES r.lane[i] = i < n ? p[i] : 0.0f;
  return r;
}
inline void store_part(float* p, Floats a, int n) {
  for (int i = 0; i < n; ++i) p[i] = a.lane[i];
}
inline Floats load_f16(const void* p) {
  uint16_t bits[16];
  std::memcpy(bits, p, 32);
  Floats r;
  HEADRACE_LANES r.lane[i] = float_from_f16(bits[i]);
  return r;
}
inline Floats load_bf16(const void* p) {
  uint16_t bits[16];
  std::memcpy(bits, p, 32);
  Floats r;
  HEADRACE_LANES r.lane[i] = float_from_bf16(bits[i]);
  return r;
}
// A 256th of sixteen e4m3 numbers.
inline Floats load_e4m3(const void* p) {
  uint8_t bits[16];
  std::memcpy(bits, p, 16);
  Floats r;
  HEADRACE_LANES r.lane[i] = float_from_f16(f16_from_e4m3(bits[i]));
  return r;
}
inline Floats load_int8(const void* p) {
  int8_t codes[16];
  std::memcpy(codes, p, 16);
  Floats r;
  HEADRACE_LANES r.lane[i] = static_cast<float>(codes[i]);
  return r;
}

inline Floats add(Floats a, Floats b) {
  HEADRACE_LANES a.lane[i] += b.lane[i];
  return a;
}
inline Floats sub(Floats a, Floats b) {
  HEADRACE_LANES a.lane[i] -= b.lane[i];
  return a;
}
inline Floats mul(Floats a, Floats b) {
  HEADRACE_LANES a.lane[i] *= b.lane[i];
  return a;
}
inline Floats div(Floats a, Floats b) {
  HEADRACE_LANES a.lane[i] /= b.lane[i];
  return a;
}
inline Floats fma(Floats a, Floats b, Floats c) {
  HEADRACE_LANES c.lane[i] = __builtin_fmaf(a.lane[i], b.lane[i], c.lane[i]);
  return c;
}
// The second argument where the two do not compare: the x86 rule, written out.
inline Floats max(Floats a, Floats b) {
  HEADRACE_LANES b.lane[i] = a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i];
  return b;
}
inline Floats min(Floats a, Floats b) {
  HEADRACE_LANES b.lane[i] = a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i];
  return b;
}

// Lane i and lane i ^ distance change places.
template <int distance>
Floats swap_lanes(Floats a) {
  Floats r;
  HEADRACE_LANES r.lane[i] = a.lane[i ^ distance];
  return r;
}
inline float first_lane(Floats a) { return a.lane[0]; }

inline Ints bits_of(Floats a) {
  Ints r;
  std::memcpy(&r, &a, 64);
  return r;
}
inline Floats from_bits(Ints a) {
  Floats r;
  std::memcpy(&r, &a, 64);
  return r;
}
inline Ints splat_int(int32_t x) {
  Ints r;
  HEADRACE_LANES r.lane[i] = x;
  return r;
}
// Lane arithmetic wraps, as the vector instructions do.
inline int32_t wrap(uint32_t x) {
  int32_t r;
  std::memcpy(&r, &x, 4);
  return r;
}
inline Ints add(Ints a, Ints b) {
  HEADRACE_LANES a.lane[i] =
      wrap(static_cast<uint32_t>(a.lane[i]) + static_cast<uint32_t>(b.lane[i]));
  return a;
}
inline Ints sub(Ints a, Ints b) {
  HEADRACE_LANES a.lane[i] =
      wrap(static_cast<uint32_t>(a.lane[i]) - static_cast<uint32_t>(b.lane[i]));
  return a;
}
inline Ints bit_and(Ints a, Ints b) {
  HEADRACE_LANES a.lane[i] &= b.lane[i];
  return a;
}
inline Ints max(Ints a, Ints b) {
  HEADRACE_LANES a.lane[i] = a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i];
  return a;
}
template <int n>
Ints shift_left(Ints a) {
  HEADRACE_LANES a.lane[i] = wrap(static_cast<uint32_t>(a.lane[i]) << n);
  return a;
}
template <int n>
Ints shift_right(Ints a) {
  HEADRACE_LANES a.lane[i] >>= n;
  return a;
}  // keeps the sign
inline Floats to_float(Ints a) {
  Floats r;
  HEADRACE_LANES r.lane[i] = static_cast<float>(a.lane[i]);
  return r;
}
inline Ints round_to_int(Floats a) {  // nearest even; |a| < 2^22
  Ints r;
  HEADRACE_LANES r.lane[i] = static_cast<int32_t>(__builtin_lrintf(a.lane[i]));
  return r;
}
inline void store(int32_t* p, Ints a) { std::memcpy(p, &a, 64); }
inline void store_int8(int8_t* p, Ints a) { HEADRACE_LANES p[i] = static_cast<int8_t>(a.lane[i]); }

// ---- integer dots. Weights may be held with an offset; a dot starts at -offset * sum of
// activations.

inline Bytes load_bytes(const void* p) {
  Bytes r;
  std::memcpy(&r, p, 64);
  return r;
}
inline void store_bytes(void* p, Bytes a) { std::memcpy(p, &a, 64); }
inline Bytes low_nibbles(Bytes a) {
  for (uint8_t& b : a.byte) b &= 15;
  return a;
}
inline Bytes high_nibbles(Bytes a) {
  for (uint8_t& b : a.byte) b >>= 4;
  return a;
}
// The high nibbles times 1 << kHighShift: none here, nothing would be gained.
inline constexpr int kHighShift = 0;
inline Bytes raised_high_nibbles(Bytes a) { return high_nibbles(a); }
// Bits [from, from + bits) of each byte, at bit `to`.
template <int from, int to, int bits>
Bytes move_bits(Bytes a) {
  for (uint8_t& b : a.byte) b = static_cast<uint8_t>((b >> from & ((1 << bits) - 1)) << to);
  return a;
}
// The same of `high`, joined with the bits of `low`, which has none there.
template <int from, int to, int bits>
Bytes join_bits(Bytes low, const Bytes& high) {
  const Bytes moved = move_bits<from, to, bits>(high);
  for (int i = 0; i < 64; ++i) low.byte[i] |= moved.byte[i];
  return low;
}

// Whether a vector of lanes is one register or a few.
inline constexpr bool kLanesInRegisters = false;

// Blocks that one row is multiplied with at once.
inline constexpr int kStreams = 1;

// Accumulators of products of floats.
inline constexpr int kFloatTile = 16;

// Rows of a tile of products.
inline constexpr int kTileRowsMost = 4;
// The same where bits of codes lie apart: each row more is a loop for each vector of a group.
inline constexpr int kSuperRowsMost = 1;

inline constexpr int kQ8Offset = 0;
inline Bytes q8_weights(Bytes codes) { return codes; }

// Entry n of sixteen bytes for each nibble n.
struct Table {
  uint8_t entry[16];
};
inline Bytes look_up(const Table& table, Bytes nibbles) {
  for (uint8_t& b : nibbles.byte) b = table.entry[b];
  return nibbles;
}
inline Table load_table(const void* p) {
  Table r;
  std::memcpy(&r, p, 16);
  return r;
}

inline constexpr int kMxfp4Offset = 12;
inline Bytes mxfp4_weights(Bytes nibbles) {
  constexpr Table table{{12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0}};
  return look_up(table, nibbles);
}
// 16 E8M0 bytes to half their value: 2^(s-128), so that doubled e2m1 codes come out right.
inline Floats half_e8m0(const void* p) {
  const uint8_t* s = static_cast<const uint8_t*>(p);
  Ints r;
  HEADRACE_LANES r.lane[i] = s[i] >= 2 ? (s[i] - 1) << 23 : 0x00200000 << s[i];
  return from_bits(r);
}

template <class Weight>
Ints dot_add(Ints acc, const Bytes& weights, const int8_t* quad) {
  HEADRACE_LANES {
    for (int j = 0; j < 4; ++j) {
      acc.lane[i] += int32_t{static_cast<Weight>(weights.byte[i * 4 + j])} * int32_t{quad[j]};
    }
  }
  return acc;
}
inline Ints dot_q8(Ints acc, Bytes w, const int8_t* quad) { return dot_add<int8_t>(acc, w, quad); }
inline Ints dot_small(Ints acc, Bytes w, const int8_t* quad) {
  return dot_add<uint8_t>(acc, w, quad);
}
template <int most>
using SmallRun = WideRun<Ints, dot_small, 2>;

inline void prefetch(const void*) {}
inline void prefetch_far(const void*) {}

#undef HEADRACE_LANES

}  // namespace headrace::HEADRACE_ISA
