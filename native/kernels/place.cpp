#include "kernels/place.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "kernels/small_float.h"
#include "kernels/words.h"

namespace headrace {
namespace {

// Sixteen inputs at a time: four words of each output. `offset` is added to every code.
template <bool kNibbles>
void place_words(const uint8_t* codes, int64_t stride, int32_t group, uint8_t offset,
                 uint8_t* packed) {
  const Words4 offsets = Words4{} + offset * 0x01010101u;
  for (int32_t output = 0; output < kBlockOutputs; output += 4) {
    uint8_t* to = packed + output * 4;
    for (int32_t k = 0; k < group; k += 16) {
      Words4 words[4];
      for (int i = 0; i < 4; ++i) {
        words[i] = load_as<Words4>(codes + (output + i) * stride + k);
        if constexpr (kNibbles) {
          words[i] = (Words4)((Bytes16)words[i] + (Bytes16)offsets);
        }
      }
      transpose(words);
      if constexpr (kNibbles) {
        store_as(to + k * 8, words[0] | words[1] << 4);
        store_as(to + k * 8 + 64, words[2] | words[3] << 4);
      } else {
        for (int i = 0; i < 4; ++i) store_as(to + k * 16 + i * 64, words[i]);
      }
    }
  }
}

void place_codes(Format format, const uint8_t* codes, int64_t stride, int32_t group,
                 uint8_t* packed) {
  const uint8_t offset = format == Format::Q4 || format == Format::Q4F ? 8 : 0;
  if (format == Format::F8) {
    place_bytes(codes, stride, group, packed);
  } else if (is_nibbles(format)) {
    place_words<true>(codes, stride, group, offset, packed);
  } else {
    place_words<false>(codes, stride, group, 0, packed);
  }
}

// ---- scales: the numbers of sixteen outputs; each returns whether the format holds all exactly

using BlockNumbers = float[kBlockOutputs];

// A NaN equals nothing, and of an infinity the difference to itself is NaN.
uint32_t is_other(float held, float number) {
  return static_cast<uint32_t>(!(held == number)) | static_cast<uint32_t>(!(number - number == 0));
}

bool place_f16(const BlockNumbers& numbers, uint8_t* to) {
  uint16_t halves[kBlockOutputs];
  uint32_t found = 0;
  for (int32_t i = 0; i < kBlockOutputs; ++i) {
    halves[i] = f16_from_float(numbers[i]);
    found |= is_other(float_from_finite_f16(halves[i]), numbers[i]);
  }
  std::memcpy(to, halves, sizeof halves);
  return found == 0;
}

// Powers of two from 2^-127, which is subnormal, to 2^127.
bool place_e8m0(const BlockNumbers& numbers, uint8_t* to) {
  uint32_t found = 0;
  for (int32_t i = 0; i < kBlockOutputs; ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(numbers[i]);
    const uint32_t exponent = bits >> 23;
    to[i] = static_cast<uint8_t>(exponent);
    const bool is_power = (bits & 0x007fffffu) == 0 && exponent - 1 < 254;
    found |= static_cast<uint32_t>(!(is_power || bits == 0x00400000u));
  }
  return found == 0;
}

bool place_f32(const BlockNumbers& numbers, float limit, uint8_t* to) {
  uint32_t found = 0;
  for (int32_t i = 0; i < kBlockOutputs; ++i) {
    found |= static_cast<uint32_t>(!(numbers[i] < limit)) |
             static_cast<uint32_t>(!(numbers[i] > -limit));
  }
  std::memcpy(to, numbers, sizeof numbers);
  return found == 0;
}

bool place_numbers(Format format, const BlockNumbers& scales, uint8_t* to) {
  if (format == Format::Q8 || format == Format::Q4) return place_f16(scales, to);
  if (format == Format::MXFP4) return place_e8m0(scales, to);
  return place_f32(scales, format == Format::F8 ? 0x1p119f : INFINITY, to);
}

bool has_nan_code(const uint8_t* codes, int32_t group) {
  uint8_t found = 0;
  for (int32_t k = 0; k < group; ++k) {
    found = static_cast<uint8_t>(found | ((codes[k] & 0x7fu) == 0x7fu));
  }
  return found != 0;
}

void gather(const float* numbers, int64_t stride, BlockNumbers& of_outputs) {
  for (int32_t i = 0; i < kBlockOutputs; ++i) of_outputs[i] = numbers[i * stride];
}

// Whether the format holds the numbers of one output alone: what is asked once some are not held.
bool is_held(Format format, float scale, float minimum) {
  BlockNumbers scales, minimums;
  uint8_t ignored[sizeof scales];
  std::fill_n(scales, kBlockOutputs, scale);
  std::fill_n(minimums, kBlockOutputs, minimum);
  return place_numbers(format, scales, ignored) && place_f32(minimums, INFINITY, ignored);
}

// Scales and minimums of one group; returns the first output whose are not held, or -1.
int32_t place_scales(Format format, int32_t group, const CodeBand& band, int32_t g, uint8_t* to) {
  BlockNumbers scales, minimums = {};
  gather(band.scales + g, band.scale_stride, scales);
  bool is_good = place_numbers(format, scales, to);
  if (has_minimum(format)) {
    gather(band.minimums + g, band.scale_stride, minimums);
    is_good &= place_f32(minimums, INFINITY, to + sizeof scales);
  }
  const auto is_nan = [&](int32_t output) {
    return format == Format::F8 &&
           has_nan_code(band.codes + output * band.code_stride + int64_t{g} * group, group);
  };
  if (is_good && format != Format::F8) return -1;
  for (int32_t output = 0; output < kBlockOutputs; ++output) {
    if (!is_held(format, scales[output], minimums[output]) || is_nan(output)) return output;
  }
  return -1;
}

// ---- formats with multiples

// Which bits of a code a plane holds; bits 0: there is no such plane.
struct PlaneBits {
  int32_t first, bits;
};

// Words 0..7 are inputs 4 i .. 4 i + 3 of four outputs: their bits become `bits` vectors of the
// plane.
void place_plane(const Words4 (&words)[8], PlaneBits plane, uint8_t* packed) {
  if (plane.bits == 0) return;
  const int32_t together = 8 / plane.bits;
  const Words4 mask = Words4{} + ((1u << plane.bits) - 1u) * 0x01010101u;
  for (int32_t i = 0; i < plane.bits; ++i) {
    Words4 joined{};
    for (int32_t j = 0; j < together; ++j) {
      joined |= (words[i * together + j] >> plane.first & mask) << (j * plane.bits);
    }
    store_as(packed + i * 64, joined);
  }
}

void place_planes(Format format, const SuperBand& band, uint8_t* low, uint8_t* high) {
  const CodePlanes planes = code_planes(format);
  for (int32_t output = 0; output < kBlockOutputs; output += 4) {
    for (int32_t k = 0; k < kSuperInputs; k += 32) {
      Words4 words[8];
      for (int32_t half = 0; half < 2; ++half) {
        Words4 four[4];
        for (int32_t i = 0; i < 4; ++i) {
          four[i] = load_as<Words4>(&band.codes[output + i][k + half * 16]);
        }
        transpose(four);
        for (int32_t i = 0; i < 4; ++i) words[half * 4 + i] = four[i];
      }
      const int32_t at = k * 2, column = output * 4;
      place_plane(words, {0, planes.low_bits}, low + at * planes.low_bits + column);
      place_plane(words, {planes.low_bits, planes.high_bits},
                  high + at * planes.high_bits + column);
    }
  }
}

// Group by group, of the sixteen outputs; there may be no more than eight groups.
void place_multiples(const int8_t (&multiples)[kBlockOutputs][16], int32_t groups,
                     uint8_t* packed) {
  uint8_t turned[16 * kBlockOutputs];
  place_bytes(reinterpret_cast<const uint8_t*>(multiples), 16, 16, turned);
  std::memcpy(packed, turned, static_cast<size_t>(groups * kBlockOutputs));
}

bool is_finite_half(uint16_t bits) { return (bits & 0x7c00u) != 0x7c00u; }

}  // namespace

// Four rounds that interleave bytes of two halves.
void place_bytes(const uint8_t* codes, int64_t stride, int32_t group, uint8_t* packed) {
  for (int32_t k = 0; k < group; k += 16) {
    Bytes16 rows[16], next[16];
    for (int i = 0; i < 16; ++i) rows[i] = load_as<Bytes16>(codes + i * stride + k);
    for (int round = 0; round < 4; ++round) {
      for (int i = 0; i < 8; ++i) {
        const Bytes16 x = rows[i], y = rows[i + 8];
        next[2 * i] =
            __builtin_shufflevector(x, y, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        next[2 * i + 1] = __builtin_shufflevector(x, y, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13,
                                                  29, 14, 30, 15, 31);
      }
      std::memcpy(rows, next, sizeof rows);
    }
    for (int i = 0; i < 16; ++i) store_as(packed + (k + i) * 16, rows[i]);
  }
}

int32_t place_super_group(Format format, int32_t group, const SuperBand& band, std::byte* packed) {
  const SuperLayout layout = super_layout(format, group);
  auto* to = reinterpret_cast<uint8_t*>(packed);
  const bool has_minimums = has_minimum(format);
  std::memset(to, 0, 64);
  std::memcpy(to, band.units, 32);
  if (has_minimums) std::memcpy(to + layout.minimum_units, band.minimum_units, 32);
  place_multiples(band.multiples, layout.groups, to + layout.multiples);
  if (has_minimums) {
    place_multiples(band.minimum_multiples, layout.groups, to + layout.minimum_multiples);
  }
  int32_t bad = -1;
  for (int32_t output = kBlockOutputs - 1; output >= 0; --output) {
    const bool is_held = is_finite_half(band.units[output]) &&
                         (!has_minimums || is_finite_half(band.minimum_units[output]));
    if (!is_held) bad = output;
  }
  place_planes(format, band, to + layout.low, to + layout.high);
  return bad;
}

int64_t place_groups(Format format, int32_t group, int32_t num_groups, const CodeBand& band,
                     std::byte* packed) {
  const int64_t bytes = group_bytes(format, group);
  const int64_t scales_at = code_bytes(format, group);
  int64_t first_bad = INT64_MAX;
  for (int32_t g = 0; g < num_groups; ++g) {
    uint8_t* to = reinterpret_cast<uint8_t*>(packed) + g * bytes;
    place_codes(format, band.codes + int64_t{g} * group, band.code_stride, group, to);
    const int32_t bad = place_scales(format, group, band, g, to + scales_at);
    if (bad < 0) continue;
    const int64_t index = int64_t{bad} * num_groups + g;
    first_bad = index < first_bad ? index : first_bad;
  }
  return first_bad == INT64_MAX ? -1 : first_bad;
}

}  // namespace headrace
