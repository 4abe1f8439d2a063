// Source: the block structures of ggml (`ggml-common.h`), described in words in docs/gguf.md.
#include "kernels/gguf_blocks.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <string>

#include "base/error.h"
#include "kernels/kernel_table.h"
#include "kernels/place.h"
#include "kernels/small_float.h"
#include "kernels/words.h"

namespace headrace {
namespace {

constexpr int32_t kMaxBlock = 256;
constexpr int32_t kMaxGroups = kMaxBlock / 16;

float half_at(const uint8_t* bytes) {
  uint16_t bits;
  std::memcpy(&bits, bytes, 2);
  return float_from_f16(bits);
}

uint32_t word_at(const uint8_t* bytes) {
  uint32_t word;
  std::memcpy(&word, bytes, 4);
  return word;
}

uint8_t byte_of(int32_t code) { return static_cast<uint8_t>(code); }

Bytes16 splat(uint8_t byte) { return Bytes16{} + byte; }

// Low nibbles of 16 bytes are codes 0..15, high ones 16..31, each less `offset`.
void split_nibbles(const uint8_t* packed, uint8_t offset, uint8_t* codes) {
  const auto pairs = load_as<Bytes16>(packed);
  store_as(codes, (pairs & 15) - splat(offset));
  store_as(codes + 16, (pairs >> 4) - splat(offset));
}

void decode_q4_0(const uint8_t* b, uint8_t* codes, float* scales, float*) {
  scales[0] = half_at(b);
  split_nibbles(b + 2, 8, codes);
}

void decode_q4_1(const uint8_t* b, uint8_t* codes, float* scales, float* minimums) {
  scales[0] = half_at(b);
  minimums[0] = half_at(b + 2);
  split_nibbles(b + 4, 0, codes);
}

// Bit i of sixteen as 16 or 0 in byte i.
Bytes16 fifth_bits(uint32_t bits) {
  constexpr uint64_t kEach = 0x0101010101010101u;
  const Doubles2 bytes{(bits & 255) * kEach, (bits >> 8 & 255) * kEach};
  const Bytes16 place{1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
  return (Bytes16)(((Bytes16)bytes & place) == place) & 16;
}

void split_with_fifth_bits(const uint8_t* packed, uint32_t bits, uint8_t offset, uint8_t* codes) {
  const auto pairs = load_as<Bytes16>(packed);
  store_as(codes, ((pairs & 15) | fifth_bits(bits)) - splat(offset));
  store_as(codes + 16, ((pairs >> 4) | fifth_bits(bits >> 16)) - splat(offset));
}

void decode_q5_0(const uint8_t* b, uint8_t* codes, float* scales, float*) {
  scales[0] = half_at(b);
  split_with_fifth_bits(b + 6, word_at(b + 2), 16, codes);
}

void decode_q5_1(const uint8_t* b, uint8_t* codes, float* scales, float* minimums) {
  scales[0] = half_at(b);
  minimums[0] = half_at(b + 2);
  split_with_fifth_bits(b + 8, word_at(b + 4), 0, codes);
}

void decode_q8_0(const uint8_t* b, uint8_t* codes, float* scales, float*) {
  scales[0] = half_at(b);
  std::memcpy(codes, b + 2, 32);
}

void decode_mxfp4(const uint8_t* b, uint8_t* codes, float* scales, float*) {
  scales[0] = std::bit_cast<float>(b[0] == 0 ? 0x00400000u : uint32_t{b[0]} << 23);
  split_nibbles(b + 1, 0, codes);
}

// What the nibbles of ggml's "non-linear" types stand for.
constexpr int8_t kNonLinear[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                   1,    13,   25,  38,  53,  69,  89,  113};

void decode_iq4_nl(const uint8_t* b, uint8_t* codes, float* scales, float*) {
  scales[0] = half_at(b);
  split_nibbles(b + 2, 0, codes);
}

void decode_iq4_xs(const uint8_t* b, uint8_t* codes, float* scales, float*) {
  const float d = half_at(b);
  const int32_t high = b[2] | b[3] << 8;
  for (int32_t j = 0; j < 8; ++j) {
    const int32_t low = b[4 + j / 2] >> (4 * (j % 2)) & 15;
    scales[j] = d * static_cast<float>((low | (high >> (2 * j) & 3) << 4) - 32);
    split_nibbles(b + 8 + 16 * j, 0, codes + 32 * j);
  }
}

// ---- types with 256 values in a block, whose scales are multiples of one number

uint16_t half_bits_at(const uint8_t* bytes) {
  uint16_t bits;
  std::memcpy(&bits, bytes, 2);
  return bits;
}

// Scale and minimum of sub-block j of Q4_K and Q5_K, six bits each, in 12 bytes.
void scale_and_minimum(const uint8_t* s, int32_t j, int8_t& scale, int8_t& minimum) {
  if (j < 4) {
    scale = static_cast<int8_t>(s[j] & 63);
    minimum = static_cast<int8_t>(s[j + 4] & 63);
  } else {
    scale = static_cast<int8_t>((s[j + 4] & 15) | (s[j - 4] >> 6) << 4);
    minimum = static_cast<int8_t>((s[j + 4] >> 4) | (s[j] >> 6) << 4);
  }
}

// The file subtracts minimums.
uint16_t negative(uint16_t half) { return static_cast<uint16_t>(half ^ 0x8000u); }

void split_sub_blocks(const uint8_t* b, SuperBlock& out) {
  out.unit = half_bits_at(b);
  out.minimum_unit = negative(half_bits_at(b + 2));
  for (int32_t j = 0; j < 8; ++j) {
    scale_and_minimum(b + 4, j, out.multiples[j], out.minimum_multiples[j]);
  }
}

void split_q4_k(const uint8_t* b, SuperBlock& out) {
  split_sub_blocks(b, out);
  for (int32_t chunk = 0; chunk < 4; ++chunk) {
    const uint8_t* q = b + 16 + 32 * chunk;
    uint8_t* to = out.codes + 64 * chunk;
    for (int32_t i = 0; i < 32; ++i) {
      to[i] = q[i] & 15;
      to[i + 32] = q[i] >> 4;
    }
  }
}

void split_q5_k(const uint8_t* b, SuperBlock& out) {
  split_sub_blocks(b, out);
  const uint8_t* high = b + 16;
  for (int32_t chunk = 0; chunk < 4; ++chunk) {
    const uint8_t* q = b + 48 + 32 * chunk;
    uint8_t* to = out.codes + 64 * chunk;
    for (int32_t i = 0; i < 32; ++i) {
      to[i] = byte_of((q[i] & 15) | (high[i] >> (2 * chunk) & 1) << 4);
      to[i + 32] = byte_of((q[i] >> 4) | (high[i] >> (2 * chunk + 1) & 1) << 4);
    }
  }
}

void split_q6_k(const uint8_t* b, SuperBlock& out) {
  out.unit = half_bits_at(b + 208);
  std::memcpy(out.multiples, b + 192, 16);
  for (int32_t half = 0; half < 2; ++half) {
    const uint8_t *low = b + 64 * half, *high = b + 128 + 32 * half;
    uint8_t* to = out.codes + 128 * half;
    for (int32_t i = 0; i < 32; ++i) {
      to[i] = byte_of((low[i] & 15) | (high[i] & 3) << 4);
      to[i + 32] = byte_of((low[i + 32] & 15) | (high[i] >> 2 & 3) << 4);
      to[i + 64] = byte_of((low[i] >> 4) | (high[i] >> 4 & 3) << 4);
      to[i + 96] = byte_of((low[i + 32] >> 4) | (high[i] >> 6) << 4);
    }
  }
}

// Two bits of each code: 32 bytes hold those of inputs i, i + 32, i + 64 and i + 96.
void split_two_bits(const uint8_t* packed, uint8_t* codes) {
  for (int32_t i = 0; i < 64; i += 16) {
    const auto quads = load_as<Bytes16>(packed + i);
    uint8_t* const to = codes + i / 32 * 128 + i % 32;
    store_as(to, quads & 3);
    store_as(to + 32, quads >> 2 & 3);
    store_as(to + 64, quads >> 4 & 3);
    store_as(to + 96, quads >> 6);
  }
}

void split_q2_k(const uint8_t* b, SuperBlock& out) {
  out.unit = half_bits_at(b + 80);
  out.minimum_unit = negative(half_bits_at(b + 82));
  const auto pairs = load_as<Bytes16>(b);
  const Bytes16 multiples = pairs & 15, minimum_multiples = pairs >> 4;
  std::memcpy(out.multiples, &multiples, 16);
  std::memcpy(out.minimum_multiples, &minimum_multiples, 16);
  split_two_bits(b + 16, out.codes);
}

void split_q3_k(const uint8_t* b, SuperBlock& out) {
  out.unit = half_bits_at(b + 108);
  const uint8_t* s = b + 96;
  const uint64_t low = load_as<uint64_t>(s);
  constexpr uint64_t kNibbles = 0x0f0f0f0f0f0f0f0fu;
  const uint32_t high = word_at(s + 8);
  const Words4 lows = (Words4)(Doubles2{low & kNibbles, low >> 4 & kNibbles});
  const Words4 highs = Words4{high, high >> 2, high >> 4, high >> 6} & 0x03030303u;
  const Bytes16 multiples = (Bytes16)(lows | highs << 4) - splat(32);
  std::memcpy(out.multiples, &multiples, 16);
  split_two_bits(b + 32, out.codes);
  for (int32_t i = 0; i < 32; i += 16) {
    auto bits = load_as<Bytes16>(b + i);
    for (int32_t run = 0; run < 8; ++run, bits >>= 1) {
      uint8_t* const codes = out.codes + run * 32 + i;
      store_as(codes, load_as<Bytes16>(codes) | (bits & 1) << 2);
    }
  }
}

// The same block for a format with a float32 scale for each group.
template <void (*split)(const uint8_t*, SuperBlock&), Format format, int32_t group>
void decode_super_block(const uint8_t* b, uint8_t* codes, float* scales, float* minimums) {
  constexpr CodePlanes kPlanes = code_planes(format);
  int8_t multiples[16], minimum_multiples[16];
  SuperBlock block{codes, multiples, minimum_multiples, 0, 0};
  split(b, block);
  for (int32_t i = 0; i < kSuperInputs; ++i) codes[i] = byte_of(codes[i] - kPlanes.offset);
  for (int32_t j = 0; j < kSuperInputs / group; ++j) {
    scales[j] = float_from_f16(block.unit) * static_cast<float>(multiples[j]);
    if constexpr (kPlanes.has_minimum) {
      minimums[j] = float_from_f16(block.minimum_unit) * static_cast<float>(minimum_multiples[j]);
    }
  }
}

template <void (*split)(const uint8_t*, SuperBlock&), Format format, int32_t group>
constexpr GgufType super_type(int32_t id, int32_t nbytes) {
  return {id, kSuperInputs, nbytes, group, decode_super_block<split, format, group>, format, split};
}

constexpr std::array<GgufType, 13> kTypes{{
    {2, 32, 18, 32, decode_q4_0, Format::Q4, nullptr},
    {3, 32, 20, 32, decode_q4_1, Format::Q4A, nullptr},
    {6, 32, 22, 32, decode_q5_0, Format::Q8F, nullptr},
    {7, 32, 24, 32, decode_q5_1, Format::Q8A, nullptr},
    {8, 32, 34, 32, decode_q8_0, Format::Q8, nullptr},
    super_type<split_q2_k, Format::Q2K, 16>(10, 84),
    super_type<split_q3_k, Format::Q3K, 16>(11, 110),
    super_type<split_q4_k, Format::Q4K, 32>(12, 144),
    super_type<split_q5_k, Format::Q5K, 32>(13, 176),
    super_type<split_q6_k, Format::Q6K, 16>(14, 210),
    {20, 32, 18, 32, decode_iq4_nl, Format::Q8F, nullptr, kNonLinear},
    {23, 256, 136, 32, decode_iq4_xs, Format::Q8F, nullptr, kNonLinear},
    {39, 32, 17, 32, decode_mxfp4, Format::MXFP4, nullptr, kDoubledE2m1},
}};

// Some groups of the 16 outputs of a block of packed rows, filled row by row.
struct Strip {
  uint8_t codes[kBlockOutputs * kMaxBlock];
  float scales[kBlockOutputs * kMaxGroups];
  float minimums[kBlockOutputs * kMaxGroups];
};

// One row of a strip: whole blocks, with a scale for each of the packed format's groups.
void decode_row(const uint8_t* source, const GgufType& type, Format format, int32_t group,
                int32_t count, int32_t output, Strip& strip) {
  uint8_t* codes = strip.codes + output * kMaxBlock;
  float* const scales = strip.scales + output * kMaxGroups;
  float* const minimums = strip.minimums + output * kMaxGroups;
  int32_t groups = 0;
  for (int32_t at = 0; at < count; at += type.block, source += type.nbytes) {
    type.decode(source, codes + at, scales + groups, minimums + groups);
    groups += type.block / type.group;
  }
  if (type.numbers != nullptr && format != Format::MXFP4) {
    // Whole vectors, if need be beyond the codes: a strip has room for kMaxBlock.
    kernels().look_up(type.numbers, (count + 63) / 64 * 64, codes);
    if (type.tightest == Format::MXFP4) {  // the numbers are doubled
      for (int32_t g = 0; g < groups; ++g) scales[g] *= 0.5f;
    }
  }
  if (group == type.group) return;
  const int32_t repeat = type.group / group;
  for (int32_t g = groups * repeat - 1; g >= 0; --g) {
    scales[g] = scales[g / repeat];
    minimums[g] = minimums[g / repeat];
  }
}

// Rows past the last one: zeros, in mxfp4 of its least scale.
void clear_rows(int32_t first, Format format, Strip& strip) {
  const float no_scale = format == Format::MXFP4 ? 0x1p-127f : 0.0f;
  std::fill(strip.codes + first * kMaxBlock, strip.codes + kBlockOutputs * kMaxBlock, uint8_t{0});
  std::fill(strip.scales + first * kMaxGroups, std::end(strip.scales), no_scale);
  std::fill(strip.minimums + first * kMaxGroups, std::end(strip.minimums), 0.0f);
}

// What a block of `type` is in a format that holds more: codes from that format's zero on, and the
// multiples of a group twice where it has two groups for it.
void widen(const GgufType& type, Format format, int32_t group, SuperBlock& block) {
  const int32_t more = code_planes(format).offset - code_planes(type.tightest).offset;
  for (int32_t i = 0; i < kSuperInputs; ++i) block.codes[i] = byte_of(block.codes[i] + more);
  for (int32_t j = kSuperInputs / group - 1; j >= 0; --j) {
    block.multiples[j] = block.multiples[j * group / type.group];
    block.minimum_multiples[j] = block.minimum_multiples[j * group / type.group];
  }
}

// Blocks of a type whose own format has multiples: the parts of a block stay apart.
int64_t repack_super_blocks(const uint8_t* source, const GgufType& type, int32_t rows, int32_t cols,
                            Format format, int32_t group, std::byte* packed) {
  const int32_t supers = cols / kSuperInputs;
  const int64_t step = super_layout(format, group).nbytes;
  int64_t first_bad = -1;
  SuperBand band{};
  for (int32_t row = 0; row < rows; row += kBlockOutputs) {
    const int32_t num_rows = std::min(kBlockOutputs, rows - row);
    if (num_rows < kBlockOutputs) band = {};  // rows past the last one
    for (int32_t i = 0; i < supers; ++i, packed += step) {
      for (int32_t output = 0; output < num_rows; ++output) {
        const uint8_t* from = source + (int64_t{row + output} * supers + i) * type.nbytes;
        SuperBlock block{band.codes[output], band.multiples[output], band.minimum_multiples[output],
                         0, 0};
        type.split(from, block);
        if (format != type.tightest) widen(type, format, group, block);
        band.units[output] = block.unit;
        band.minimum_units[output] = block.minimum_unit;
      }
      const int32_t bad = place_super_group(format, group, band, packed);
      if (bad < 0) continue;
      const int64_t index = int64_t{row + bad} * cols + i * kSuperInputs;
      first_bad = first_bad < 0 ? index : std::min(first_bad, index);
    }
  }
  return first_bad;
}

}  // namespace

const GgufType& gguf_type(int32_t id) {
  for (const GgufType& type : kTypes) {
    if (type.id == id) return type;
  }
  throw Error(ErrorKind::UnsupportedModel,
              "GGUF tensor type " + std::to_string(id) + " has no blocks that are decoded here");
}

void require_gguf(const GgufType& type, int32_t cols, Format format, int32_t group) {
  const bool has_own_scales = format == type.tightest && group == type.group;
  const bool holds_multiples =
      has_multiples(type.tightest) &&
      ((format == Format::Q6KA && group == 16) ||
       (format == Format::Q5K && group == 32 && type.tightest == Format::Q4K));
  const bool is_wider =
      (group == 16 || group == 32) && type.group % group == 0 &&
      (format == Format::Q8A || (format == Format::Q8F && !has_minimum(type.tightest)));
  if (cols > 0 && cols % type.block == 0 && (has_own_scales || holds_multiples || is_wider)) {
    return;
  }
  throw Error(ErrorKind::Shape, "rows of " + std::to_string(cols) + " values of GGUF type " +
                                    std::to_string(type.id) + " do not fit format " +
                                    format_name(format) + " with groups of " +
                                    std::to_string(group));
}

int64_t repack_gguf(const std::byte* source, const GgufType& type, int32_t rows, int32_t cols,
                    Format format, int32_t group, std::byte* packed) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(source);
  if (has_multiples(format)) {
    return repack_super_blocks(bytes, type, rows, cols, format, group, packed);
  }
  const int64_t row_bytes = int64_t{cols} / type.block * type.nbytes;
  const int64_t step = group_bytes(format, group);
  int64_t first_bad = -1;
  Strip strip{};  // types without minimums leave them zero
  for (int32_t row = 0; row < rows;
       row += kBlockOutputs, packed += block_bytes(format, cols, group)) {
    const int32_t num_rows = std::min(kBlockOutputs, rows - row);
    if (num_rows < kBlockOutputs) clear_rows(num_rows, format, strip);
    for (int32_t col = 0; col < cols; col += kMaxBlock) {
      const int32_t count = std::min(kMaxBlock, cols - col);
      const int32_t groups = count / group;
      for (int32_t i = 0; i < num_rows; ++i) {
        const uint8_t* from = bytes + (row + i) * row_bytes + col / type.block * type.nbytes;
        decode_row(from, type, format, group, count, i, strip);
      }
      const CodeBand band{strip.codes, kMaxBlock, strip.scales, strip.minimums, kMaxGroups};
      const int64_t bad = place_groups(format, group, groups, band, packed + col / group * step);
      if (bad < 0) continue;
      const int64_t index = (row + bad / groups) * int64_t{cols} + col + bad % groups * group;
      first_bad = first_bad < 0 ? index : std::min(first_bad, index);
    }
  }
  return first_bad;
}

}  // namespace headrace
