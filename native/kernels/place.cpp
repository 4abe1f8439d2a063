#include "kernels/place.h"

#include <bit>
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

bool is_finite(float value) {
  return (std::bit_cast<uint32_t>(value) & 0x7f800000u) != 0x7f800000u;
}

// ---- scales: each returns whether the format holds the number exactly

bool place_f16(float scale, uint8_t* to) {
  const uint16_t bits = f16_from_float(scale);
  std::memcpy(to, &bits, 2);
  return is_finite(scale) && float_from_f16(bits) == scale;
}

// A power of two from 2^-127, which is subnormal, to 2^127.
bool place_e8m0(float scale, uint8_t* to) {
  const uint32_t bits = std::bit_cast<uint32_t>(scale);
  *to = static_cast<uint8_t>(bits >> 23);
  return bits == 0x00400000u || ((bits & 0x807fffffu) == 0 && bits != 0 && is_finite(scale));
}

bool place_f32(float scale, uint8_t* to) {
  std::memcpy(to, &scale, 4);
  return is_finite(scale);
}

bool place_scale(Format format, float scale, int32_t output, uint8_t* scales) {
  if (format == Format::Q8 || format == Format::Q4) return place_f16(scale, scales + output * 2);
  if (format == Format::MXFP4) return place_e8m0(scale, scales + output);
  const bool is_held = place_f32(scale, scales + output * 4);
  return is_held && (format != Format::F8 || (scale < 0x1p119f && scale > -0x1p119f));
}

bool has_nan_code(const uint8_t* codes, int32_t group) {
  uint8_t found = 0;
  for (int32_t k = 0; k < group; ++k) {
    found = static_cast<uint8_t>(found | ((codes[k] & 0x7fu) == 0x7fu));
  }
  return found != 0;
}

// Scales and minimums of one group; returns the first output whose are not held, or -1.
int32_t place_scales(Format format, int32_t group, const CodeBand& band, int32_t g,
                     uint8_t* scales) {
  int32_t bad = -1;
  for (int32_t output = kBlockOutputs - 1; output >= 0; --output) {
    const int64_t at = output * band.scale_stride + g;
    bool is_held = place_scale(format, band.scales[at], output, scales);
    if (has_minimum(format)) {
      is_held &= place_f32(band.minimums[at], scales + kBlockOutputs * 4 + output * 4);
    }
    if (format == Format::F8) {
      is_held &= !has_nan_code(band.codes + output * band.code_stride + g * group, group);
    }
    if (!is_held) bad = output;
  }
  return bad;
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
  int32_t bad = -1;
  for (int32_t output = kBlockOutputs - 1; output >= 0; --output) {
    for (int32_t g = 0; g < layout.groups; ++g) {
      const int32_t at = g * kBlockOutputs + output;
      to[layout.multiples + at] = static_cast<uint8_t>(band.multiples[output][g]);
      if (has_minimums) {
        to[layout.minimum_multiples + at] = static_cast<uint8_t>(band.minimum_multiples[output][g]);
      }
    }
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
