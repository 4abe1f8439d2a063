// Source: the packing of compressed-tensors, AutoAWQ's GEMM kernels, GPTQ's files and
// TensorRT Model Optimizer's NVFP4, as docs/checkpoints.md tells them in words.
#include "kernels/coded.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <string>
#include <vector>

#include "base/error.h"
#include "kernels/place.h"
#include "kernels/small_float.h"
#include "kernels/words.h"

namespace headrace {
namespace {

using Halves8 = uint16_t __attribute__((vector_size(16)));

constexpr int32_t kWordCodes = 8;
constexpr int64_t kMinimumsAt = kBlockOutputs * 4;  // behind the scales
constexpr int32_t kLargestGroup = 128;
constexpr int64_t kNone = INT64_MAX;

// A packed matrix that is being filled.
struct Target {
  uint8_t* data;
  Format format;
  int32_t rows, cols, group, blocks, groups;
  int64_t bytes_of_block, bytes_of_group, scales_at;

  Target(const ExpertMatrix& matrix, std::byte* packed)
      : data(reinterpret_cast<uint8_t*>(packed)),
        format(matrix.format),
        rows(matrix.rows),
        cols(matrix.cols),
        group(matrix.group),
        blocks(static_cast<int32_t>(num_blocks(rows))),
        groups(static_cast<int32_t>(num_groups(cols, group))),
        bytes_of_block(block_bytes(format, cols, group)),
        bytes_of_group(group_bytes(format, group)),
        scales_at(code_bytes(format, group)) {}

  uint8_t* at(int32_t block, int32_t g) const {
    return data + block * bytes_of_block + g * bytes_of_group;
  }
  int32_t outputs(int32_t block) const {
    return std::min(kBlockOutputs, rows - block * kBlockOutputs);
  }
  // Two codes of outputs that do not exist: zeros, as the format writes them.
  uint8_t blank() const { return format == Format::Q4F ? 0x88 : 0; }
};

// ---- codes of four bits

// Eight codes of a word, n0 n1 ... n7 from its lowest bits on, become n0 n4 n1 n5 n2 n6 n3 n7: byte
// i then holds codes i and i + 4, as the packed formats pair them.
Words4 pair_codes(Words4 x) {
  Words4 t = (x ^ (x >> 8)) & 0x0000ff00u;
  x ^= t ^ (t << 8);
  t = (x ^ (x >> 4)) & 0x00f000f0u;
  return x ^ t ^ (t << 4);
}

// A group of the sixteen outputs of a block, 32 inputs at a time.
void place_nibbles(const uint8_t* codes, int64_t stride, int32_t group, uint8_t* to) {
  for (int32_t k = 0; k < group; k += 32) {
    for (int32_t output = 0; output < kBlockOutputs; output += 4) {
      Words4 words[4];
      for (int i = 0; i < 4; ++i) {
        words[i] = pair_codes(load_as<Words4>(codes + (output + i) * stride + k / 2));
      }
      transpose(words);
      for (int i = 0; i < 4; ++i) store_as(to + (k / 8 + i) * 64 + output * 4, words[i]);
    }
  }
}

// Twice the numbers of e2m1 codes: 0, 1, 2, 3, 4, 6, 8 and 12.
Bytes16 doubled_e2m1(Bytes16 codes) {
  const Signed16 magnitude = (Signed16)(codes & 7);
  const Signed16 above_4 = (magnitude - 4) & (magnitude > 4);
  const Signed16 above_6 = (magnitude > 6) & 2;
  const Signed16 negative = (Signed16)codes > 7;
  // 5 and 6 are raised by one and two, 7 by three and two more.
  return (Bytes16)(((magnitude + above_4 + above_6) ^ negative) - negative);
}

// A group of sixteen inputs of e2m1 codes as whole bytes.
void place_doubled(const uint8_t* codes, int64_t stride, uint8_t* to) {
  for (int32_t output = 0; output < kBlockOutputs; output += 4) {
    Words4 words[4];
    for (int i = 0; i < 4; ++i) {
      // Built in a register: eight bytes copied over sixteen in memory wait to be read back.
      const auto pairs = (Bytes16)Doubles2{load_as<uint64_t>(codes + (output + i) * stride), 0};
      const Bytes16 low = pairs & 15, high = pairs >> 4;
      words[i] = (Words4)doubled_e2m1(__builtin_shufflevector(low, high, 0, 16, 1, 17, 2, 18, 3, 19,
                                                              4, 20, 5, 21, 6, 22, 7, 23));
    }
    transpose(words);
    for (int i = 0; i < 4; ++i) store_as(to + i * 64 + output * 4, words[i]);
  }
}

void nibbles_by_output(const uint8_t* source, int32_t first, int32_t count, const Target& target) {
  const int64_t row_bytes = target.cols / 2;
  const int32_t bytes = target.group / 2;
  uint8_t strip[kBlockOutputs * kLargestGroup / 2];
  for (int32_t row = 0; row < count; row += kBlockOutputs) {
    const int32_t outputs = std::min(kBlockOutputs, count - row);
    for (int32_t g = 0; g < target.groups; ++g) {
      const uint8_t* codes = source + row * row_bytes + g * bytes;
      int64_t stride = row_bytes;
      if (outputs < kBlockOutputs) {
        std::fill(std::begin(strip), std::end(strip), target.blank());
        for (int32_t i = 0; i < outputs; ++i)
          std::copy_n(codes + i * stride, bytes, strip + i * bytes);
        codes = strip;
        stride = bytes;
      }
      uint8_t* to = target.at((first + row) / kBlockOutputs, g);
      if (target.format == Format::Q8F) {
        place_doubled(codes, stride, to);
      } else {
        place_nibbles(codes, stride, target.group, to);
      }
    }
  }
}

void nibbles_by_input(const uint8_t* source, int32_t first, int32_t count, const Target& target) {
  const int64_t row_bytes = int64_t{target.rows} * 4;
  const int32_t step = target.group / kWordCodes;
  for (int32_t row = 0; row < count; row += step) {
    for (int32_t block = 0; block < target.blocks; ++block) {
      uint8_t* to = target.at(block, (first + row) / step);
      const int32_t outputs = target.outputs(block);
      for (int32_t i = 0; i < step; ++i, to += 64) {
        const uint8_t* from = source + (row + i) * row_bytes + int64_t{block} * 64;
        uint8_t strip[64];
        if (outputs < kBlockOutputs) {
          std::fill(std::begin(strip), std::end(strip), target.blank());
          from = std::copy_n(from, outputs * 4, strip) - outputs * 4;
        }
        for (int j = 0; j < 64; j += 16) store_as(to + j, pair_codes(load_as<Words4>(from + j)));
      }
    }
  }
}

// Eight inputs of sixteen outputs: a pair of words for each input, whose nibbles are outputs 0, 2,
// 4, 6, 1, 3, 5 and 7.
void place_interleaved(const uint64_t (&inputs)[8], uint8_t* to) {
  constexpr uint64_t kLow = 0x0f0f0f0f0f0f0f0fu;
  Bytes16
      rows[4];  // inputs i and i + 4 in a byte; outputs 0 4 1 5, 8 12 9 13, 2 6 3 7, 10 14 11 15
  for (int i = 0; i < 4; ++i) {
    const uint64_t a = inputs[i], b = inputs[i + 4];
    const uint64_t halves[2] = {(a & kLow) | (b & kLow) << 4, (a >> 4 & kLow) | (b & ~kLow)};
    std::memcpy(&rows[i], halves, 16);
  }
  const auto low_bytes = [](Bytes16 x, Bytes16 y) {
    return (Halves8)__builtin_shufflevector(x, y, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22,
                                            7, 23);
  };
  const auto high_bytes = [](Bytes16 x, Bytes16 y) {
    return (Halves8)__builtin_shufflevector(x, y, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14,
                                            30, 15, 31);
  };
  const auto low_halves = [](Halves8 x, Halves8 y) {
    return (Words4)__builtin_shufflevector(x, y, 0, 8, 1, 9, 2, 10, 3, 11);
  };
  const auto high_halves = [](Halves8 x, Halves8 y) {
    return (Words4)__builtin_shufflevector(x, y, 4, 12, 5, 13, 6, 14, 7, 15);
  };
  const Halves8 x = low_bytes(rows[0], rows[1]), y = low_bytes(rows[2], rows[3]);
  const Halves8 z = high_bytes(rows[0], rows[1]), w = high_bytes(rows[2], rows[3]);
  const Words4 a = low_halves(x, y), b = high_halves(x, y);
  const Words4 c = low_halves(z, w), d = high_halves(z, w);
  store_as(to, __builtin_shufflevector(a, c, 0, 2, 4, 6));
  store_as(to + 16, __builtin_shufflevector(a, c, 1, 3, 5, 7));
  store_as(to + 32, __builtin_shufflevector(b, d, 0, 2, 4, 6));
  store_as(to + 48, __builtin_shufflevector(b, d, 1, 3, 5, 7));
}

void nibbles_interleaved(const uint8_t* source, int32_t first, int32_t count,
                         const Target& target) {
  const int64_t row_bytes = target.rows / 2;
  for (int32_t row = 0; row < count; row += target.group) {
    for (int32_t block = 0; block < target.blocks; ++block) {
      uint8_t* to = target.at(block, (first + row) / target.group);
      const size_t bytes = static_cast<size_t>(target.outputs(block) / 2);
      for (int32_t k = 0; k < target.group; k += 8, to += 64) {
        uint64_t inputs[8];
        for (int i = 0; i < 8; ++i) {
          inputs[i] = target.blank() * 0x0101010101010101u;
          const uint8_t* from = source + (row + k + i) * row_bytes + int64_t{block} * 8;
          bytes == 8 ? std::memcpy(&inputs[i], from, 8) : std::memcpy(&inputs[i], from, bytes);
        }
        place_interleaved(inputs, to);
      }
    }
  }
}

// ---- codes of eight bits

bool is_nan_code(uint8_t code) { return (code & 0x7fu) == 0x7fu; }

int64_t bytes_by_output(const uint8_t* source, int32_t first, int32_t count, const Target& target) {
  uint8_t strip[kBlockOutputs * kLargestGroup];
  for (int32_t row = 0; row < count; row += kBlockOutputs) {
    const int32_t outputs = std::min(kBlockOutputs, count - row);
    for (int32_t g = 0; g < target.groups; ++g) {
      const int32_t width = std::min(target.group, target.cols - g * target.group);
      const uint8_t* codes = source + int64_t{row} * target.cols + g * target.group;
      int64_t stride = target.cols;
      if (outputs < kBlockOutputs || width < target.group) {
        std::fill(std::begin(strip), std::end(strip), uint8_t{0});
        for (int32_t i = 0; i < outputs; ++i)
          std::copy_n(codes + i * stride, width, strip + i * target.group);
        codes = strip;
        stride = target.group;
      }
      place_bytes(codes, stride, target.group, target.at((first + row) / kBlockOutputs, g));
    }
  }
  const int64_t size = int64_t{count} * target.cols;
  uint8_t found = 0;
  for (int64_t i = 0; i < size; ++i) found = static_cast<uint8_t>(found | is_nan_code(source[i]));
  return found == 0 ? kNone : std::find_if(source, source + size, is_nan_code) - source;
}

// ---- scales

float float_of_exponent(uint8_t exponent) {
  if (exponent == 255) return std::bit_cast<float>(0x7f800000u);
  return std::bit_cast<float>(exponent == 0 ? 0x00400000u : uint32_t{exponent} << 23);
}

float float_of_e4m3(uint8_t code) {
  if (is_nan_code(code)) return std::bit_cast<float>(0x7f800000u);
  return float_from_f16(f16_from_e4m3(code)) * 256.0f;
}

int64_t size_of(ScaleType type) {
  return type == ScaleType::F32 ? 4 : type == ScaleType::F16 || type == ScaleType::BF16 ? 2 : 1;
}

// Reads up to sixteen scales, `stride` scales apart; places that get none are left alone.
class ScaleReader {
 public:
  ScaleReader(const CodedTensor& tensor, Format format, float factor) : type_(tensor.type) {
    if (type_ != ScaleType::E4M3) return;
    const float half = format == Format::Q8F ? 0.5f : 1.0f;  // whose codes are doubled
    for (int32_t code = 0; code < 256; ++code) {
      const float value = float_of_e4m3(static_cast<uint8_t>(code));
      const float scale = tensor.factor == ScaleFactor::Divides      ? value / factor
                          : tensor.factor == ScaleFactor::Multiplies ? value * factor
                                                                     : value;
      table_[static_cast<size_t>(code)] = scale * half;
    }
  }

  void read(const uint8_t* from, int64_t stride, int32_t count, float* values) const {
    switch (type_) {
      case ScaleType::F32:
        return each(count, values,
                    [&](int32_t i) { return load_as<float>(from + i * stride * 4); });
      case ScaleType::F16:
        return each(count, values, [&](int32_t i) {
          return float_from_finite_f16(load_as<uint16_t>(from + i * stride * 2));
        });
      case ScaleType::BF16:
        return each(count, values, [&](int32_t i) {
          return float_from_bf16(load_as<uint16_t>(from + i * stride * 2));
        });
      case ScaleType::E8M0:
        return each(count, values, [&](int32_t i) { return float_of_exponent(from[i * stride]); });
      case ScaleType::E4M3:
        return each(count, values, [&](int32_t i) { return table_[from[i * stride]]; });
    }
  }

 private:
  template <class Value>
  static void each(int32_t count, float* values, Value&& value) {
    for (int32_t i = 0; i < count; ++i) values[i] = value(i);
  }

  ScaleType type_;
  std::array<float, 256> table_{};
};

// Largest magnitude, excluded: products of f8 must stay finite, and so must q4a's minimums, which
// are at most sixteen scales.
float scale_limit(Format format) {
  if (format == Format::F8) return 0x1p119f;
  return format == Format::Q4A ? 0x1p123f : std::bit_cast<float>(0x7f800000u);
}

// The place of the first of `count` scales that the format does not hold, or `count`.
int32_t first_not_held(const float* scales, int32_t count, float limit) {
  const uint32_t bound = std::bit_cast<uint32_t>(limit);
  uint32_t found = 0;
  for (int32_t i = 0; i < kBlockOutputs; ++i) {
    found |= (std::bit_cast<uint32_t>(scales[i]) & 0x7fffffffu) >= bound ? 1u : 0u;
  }
  if (found == 0) return count;
  int32_t at = 0;
  while ((std::bit_cast<uint32_t>(scales[at]) & 0x7fffffffu) < bound) ++at;
  return at;
}

// Scales of the sixteen outputs of a block, zero where there is none, for a group of the file.
void place_scales(const float* scales, int32_t block, int32_t stored_group, int32_t repeat,
                  const Target& target) {
  const int32_t first = stored_group * repeat;
  for (int32_t g = first; g < std::min(first + repeat, target.groups); ++g) {
    uint8_t* to = target.at(block, g) + target.scales_at;
    if (target.format != Format::MXFP4) {
      std::memcpy(to, scales, kBlockOutputs * 4);
      continue;
    }
    for (int32_t i = 0; i < kBlockOutputs; ++i) {
      to[i] = static_cast<uint8_t>(std::bit_cast<uint32_t>(scales[i]) >> 23);
    }
  }
}

int64_t scales_by_output(const uint8_t* source, const CodedTensor& tensor, float factor,
                         int32_t first, int32_t count, const Target& target) {
  const ScaleReader reader(tensor, target.format, factor);
  const int32_t groups = target.cols / tensor.group, repeat = tensor.group / target.group;
  const float limit = scale_limit(target.format);
  int64_t bad = kNone;
  for (int32_t row = 0; row < count; row += kBlockOutputs) {
    const int32_t outputs = std::min(kBlockOutputs, count - row);
    for (int32_t g = 0; g < groups; ++g) {
      float scales[kBlockOutputs] = {};
      const int64_t at = int64_t{row} * groups + g;
      reader.read(source + at * size_of(tensor.type), groups, outputs, scales);
      place_scales(scales, (first + row) / kBlockOutputs, g, repeat, target);
      const int32_t output = first_not_held(scales, outputs, limit);
      if (output < outputs) bad = std::min(bad, at + int64_t{output} * groups);
    }
  }
  return bad;
}

int64_t scales_by_group(const uint8_t* source, const CodedTensor& tensor, float factor,
                        int32_t first, int32_t count, const Target& target) {
  const ScaleReader reader(tensor, target.format, factor);
  const int32_t repeat = tensor.group / target.group;
  const float limit = scale_limit(target.format);
  int64_t bad = kNone;
  for (int32_t row = 0; row < count; ++row) {
    for (int32_t block = 0; block < target.blocks; ++block) {
      const int32_t outputs = target.outputs(block);
      float scales[kBlockOutputs] = {};
      const int64_t at = int64_t{row} * target.rows + block * kBlockOutputs;
      reader.read(source + at * size_of(tensor.type), 1, outputs, scales);
      place_scales(scales, block, first + row, repeat, target);
      const int32_t output = first_not_held(scales, outputs, limit);
      if (output < outputs) bad = std::min(bad, at + output);
    }
  }
  return bad;
}

int64_t scales_by_tile(const uint8_t* source, const CodedTensor& tensor, float factor,
                       int32_t first, int32_t count, const Target& target) {
  const ScaleReader reader(tensor, target.format, factor);
  const int32_t groups = (target.cols + tensor.group - 1) / tensor.group;
  const int32_t repeat = tensor.group / target.group, blocks = tensor.group / kBlockOutputs;
  const float limit = scale_limit(target.format);
  int64_t bad = kNone;
  for (int32_t row = 0; row < count; ++row) {
    for (int32_t g = 0; g < groups; ++g) {
      const int64_t at = int64_t{row} * groups + g;
      float scale = 0.0f;
      reader.read(source + at * size_of(tensor.type), 1, 1, &scale);
      const int32_t begin = (first + row) * blocks;
      for (int32_t block = begin; block < std::min(begin + blocks, target.blocks); ++block) {
        float scales[kBlockOutputs] = {};
        std::fill_n(scales, target.outputs(block), scale);
        place_scales(scales, block, g, repeat, target);
        if (first_not_held(scales, 1, limit) == 0) bad = std::min(bad, at);
      }
    }
  }
  return bad;
}

// ---- zeros, kept where the minimums will be

void place_zeros(uint64_t codes, int32_t outputs, const CodedTensor& tensor, int32_t block,
                 int32_t stored_group, const Target& target) {
  constexpr std::array<uint8_t, 8> kInOrder{0, 1, 2, 3, 4, 5, 6, 7};
  constexpr std::array<uint8_t, 8> kInterleaved{0, 4, 1, 5, 2, 6, 3, 7};  // nibble of output i
  const auto& nibble = tensor.kind == CodedKind::ZerosInterleaved ? kInterleaved : kInOrder;
  float zeros[kBlockOutputs] = {};
  for (int32_t i = 0; i < outputs; ++i) {
    const int32_t shift = i / 8 * 32 + nibble[static_cast<size_t>(i % 8)] * 4;
    const int32_t code = static_cast<int32_t>(codes >> shift & 15);
    zeros[i] = static_cast<float>(code + tensor.zero_offset);
  }
  const int32_t repeat = tensor.group / target.group;
  for (int32_t g = stored_group * repeat; g < (stored_group + 1) * repeat; ++g) {
    std::memcpy(target.at(block, g) + target.scales_at + kMinimumsAt, zeros, sizeof zeros);
  }
}

void zeros_by_output(const uint8_t* source, const CodedTensor& tensor, int32_t first, int32_t count,
                     const Target& target) {
  const int32_t groups = target.cols / tensor.group;
  for (int32_t row = 0; row < count; row += 2) {
    const int32_t block = (first + row) / 2;
    for (int32_t g = 0; g < groups; ++g) {
      const uint8_t* from = source + (int64_t{row} * groups + g) * 4;
      uint64_t codes = load_as<uint32_t>(from);
      if (row + 1 < count) codes |= uint64_t{load_as<uint32_t>(from + int64_t{groups} * 4)} << 32;
      place_zeros(codes, target.outputs(block), tensor, block, g, target);
    }
  }
}

void zeros_by_group(const uint8_t* source, const CodedTensor& tensor, int32_t first, int32_t count,
                    const Target& target) {
  const int64_t row_bytes = target.rows / 2;
  for (int32_t row = 0; row < count; ++row) {
    for (int32_t block = 0; block < target.blocks; ++block) {
      const int32_t outputs = target.outputs(block);
      uint64_t codes = 0;
      std::memcpy(&codes, source + row * row_bytes + int64_t{block} * 8,
                  static_cast<size_t>(outputs / 2));
      place_zeros(codes, outputs, tensor, block, first + row, target);
    }
  }
}

int64_t check_groups(const uint8_t* source, const CodedTensor& tensor, int32_t first,
                     int32_t count) {
  for (int32_t i = 0; i < count; ++i) {
    if (load_as<int32_t>(source + int64_t{i} * 4) != (first + i) / tensor.group) return i;
  }
  return kNone;
}

// ---- values

template <class T>
int64_t values_by_input(const uint8_t* source, T exponent, const ExpertMatrix& matrix,
                        int32_t first, int32_t count, std::byte* packed) {
  int64_t bad = kNone;
  T* const target = reinterpret_cast<T*>(packed);
  T values[kBlockOutputs];
  for (int32_t row = 0; row < count; ++row) {
    for (int32_t n = 0; n < matrix.rows; n += kBlockOutputs) {
      const int32_t outputs = std::min(kBlockOutputs, matrix.rows - n);
      const int64_t at = int64_t{row} * matrix.rows + n;
      std::fill_n(values, kBlockOutputs, T{});
      std::memcpy(values, source + at * static_cast<int64_t>(sizeof(T)),
                  static_cast<size_t>(outputs) * sizeof(T));
      for (int32_t i = 0; i < kBlockOutputs; ++i) {
        if ((values[i] & exponent) == exponent) bad = std::min(bad, at + i);
      }
      const int64_t block = n / kBlockOutputs;
      std::memcpy(target + (block * matrix.cols + first + row) * kBlockOutputs, values,
                  sizeof values);
    }
  }
  return bad;
}

int64_t place_values(const uint8_t* source, const ExpertMatrix& matrix, int32_t first,
                     int32_t count, std::byte* packed) {
  if (matrix.format == Format::F32) {
    return values_by_input<uint32_t>(source, 0x7f800000u, matrix, first, count, packed);
  }
  const uint16_t exponent = matrix.format == Format::F16 ? 0x7c00u : 0x7f80u;
  return values_by_input<uint16_t>(source, exponent, matrix, first, count, packed);
}

int64_t value_bytes(Format format) { return format == Format::F32 ? 4 : 2; }

int64_t place_any(const uint8_t* source, const CodedTensor& tensor, float factor, int32_t first,
                  int32_t count, const Target& target) {
  switch (tensor.kind) {
    case CodedKind::NibblesByOutput:
      nibbles_by_output(source, first, count, target);
      return kNone;
    case CodedKind::NibblesByInput:
      nibbles_by_input(source, first, count, target);
      return kNone;
    case CodedKind::NibblesInterleaved:
      nibbles_interleaved(source, first, count, target);
      return kNone;
    case CodedKind::Bytes:
      return bytes_by_output(source, first, count, target);
    case CodedKind::ScalesByOutput:
      return scales_by_output(source, tensor, factor, first, count, target);
    case CodedKind::ScalesByGroup:
      return scales_by_group(source, tensor, factor, first, count, target);
    case CodedKind::ScalesByTile:
      return scales_by_tile(source, tensor, factor, first, count, target);
    case CodedKind::ZerosByOutput:
      zeros_by_output(source, tensor, first, count, target);
      return kNone;
    case CodedKind::ZerosByGroup:
    case CodedKind::ZerosInterleaved:
      zeros_by_group(source, tensor, first, count, target);
      return kNone;
    case CodedKind::GroupOfInput:
      return check_groups(source, tensor, first, count);
    case CodedKind::ValuesByInput:  // has no groups: see place_values
      return kNone;
  }
  return kNone;
}

// ---- what fits what

bool is_scale(CodedKind kind) {
  return kind >= CodedKind::ScalesByOutput && kind <= CodedKind::ScalesByTile;
}

bool fits(const CodedTensor& tensor, const ExpertMatrix& matrix) {
  const CodedKind kind = tensor.kind;
  const bool is_tiled = kind == CodedKind::ScalesByTile;
  const bool has_zeros = matrix.format == Format::Q4A;
  if (kind == CodedKind::ValuesByInput) {
    return matrix.rows > 0 && matrix.cols > 0 && !has_groups(matrix.format);
  }
  if (matrix.rows <= 0 || matrix.cols <= 0 || tensor.group <= 0 || !has_groups(matrix.format) ||
      tensor.group % matrix.group != 0) {
    return false;
  }
  if (kind == CodedKind::Bytes || is_tiled) {
    return matrix.format == Format::F8 && matrix.group <= kLargestGroup &&
           tensor.group % kBlockOutputs == 0;
  }
  if (matrix.cols % tensor.group != 0 || matrix.format == Format::F8) return false;
  const bool is_by_words = kind == CodedKind::NibblesInterleaved ||
                           kind == CodedKind::ZerosByGroup || kind == CodedKind::ZerosInterleaved;
  if (is_by_words && matrix.rows % kWordCodes != 0) return false;
  if (kind >= CodedKind::ZerosByOutput && kind <= CodedKind::ZerosInterleaved) return has_zeros;
  if (is_scale(kind)) {
    return (matrix.format == Format::MXFP4) == (tensor.type == ScaleType::E8M0) &&
           (matrix.format == Format::Q8F) == (tensor.type == ScaleType::E4M3);
  }
  const bool is_doubled = matrix.format == Format::Q8F && matrix.group == 16;
  return has_zeros || matrix.format == Format::Q4F ||
         (kind == CodedKind::NibblesByOutput && (is_doubled || matrix.format == Format::MXFP4)) ||
         kind == CodedKind::GroupOfInput;
}

template <class Kind, size_t N>
Kind parse_name(std::string_view name, const std::array<const char*, N>& names, const char* what) {
  for (size_t i = 0; i < N; ++i) {
    if (name == names[i]) return static_cast<Kind>(i);
  }
  throw Error(ErrorKind::Config, std::string("unknown ") + what + ": " + std::string(name));
}

}  // namespace

CodedKind parse_coded_kind(std::string_view name) {
  static constexpr std::array<const char*, 12> kNames{
      "nibbles_by_output", "nibbles_by_input",  "nibbles_interleaved", "bytes",
      "scales_by_output",  "scales_by_group",   "scales_by_tile",      "zeros_by_output",
      "zeros_by_group",    "zeros_interleaved", "group_of_input",      "values_by_input"};
  return parse_name<CodedKind>(name, kNames, "kind of coded tensor");
}

ScaleType parse_scale_type(std::string_view name) {
  static constexpr std::array<const char*, 5> kNames{"f32", "f16", "bf16", "e8m0", "e4m3"};
  return parse_name<ScaleType>(name, kNames, "type of scales");
}

ScaleFactor parse_scale_factor(std::string_view name) {
  static constexpr std::array<const char*, 3> kNames{"none", "multiplies", "divides"};
  return parse_name<ScaleFactor>(name, kNames, "use of a factor");
}

CodedRows coded_rows(const CodedTensor& tensor, const ExpertMatrix& matrix) {
  if (!fits(tensor, matrix)) {
    throw Error(ErrorKind::Shape,
                "a coded tensor does not fit its matrix: kind " +
                    std::to_string(static_cast<int32_t>(tensor.kind)) + ", groups of " +
                    std::to_string(tensor.group) + ", " + format_name(matrix.format) + " [" +
                    std::to_string(matrix.rows) + ", " + std::to_string(matrix.cols) + "]");
  }
  const int32_t rows = matrix.rows, cols = matrix.cols;
  const int32_t groups = (cols + tensor.group - 1) / tensor.group;
  const int64_t scale = size_of(tensor.type);
  switch (tensor.kind) {
    case CodedKind::NibblesByOutput:
      return {rows, cols / 2, cols, kBlockOutputs};
    case CodedKind::NibblesByInput:
      return {cols / kWordCodes, int64_t{rows} * 4, rows, matrix.group / kWordCodes};
    case CodedKind::NibblesInterleaved:
      return {cols, rows / 2, rows / kWordCodes, matrix.group};
    case CodedKind::Bytes:
      return {rows, cols, cols, kBlockOutputs};
    case CodedKind::ScalesByOutput:
      return {rows, groups * scale, groups, kBlockOutputs};
    case CodedKind::ScalesByGroup:
      return {groups, rows * scale, rows, 1};
    case CodedKind::ScalesByTile:
      return {(rows + tensor.group - 1) / tensor.group, groups * scale, groups, 1};
    case CodedKind::ZerosByOutput:
      return {(rows + kWordCodes - 1) / kWordCodes, int64_t{groups} * 4, groups, 2};
    case CodedKind::ZerosByGroup:
    case CodedKind::ZerosInterleaved:
      return {groups, rows / 2, rows / kWordCodes, 1};
    case CodedKind::GroupOfInput:
      return {cols, 4, 1, 1};
    case CodedKind::ValuesByInput:
      return {cols, rows * value_bytes(matrix.format), rows, 1};
  }
  return {};
}

int64_t place_coded(const std::byte* source, const CodedTensor& tensor, float factor,
                    const ExpertMatrix& matrix, int32_t first, int32_t count, std::byte* packed) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(source);
  const int64_t bad = tensor.kind == CodedKind::ValuesByInput
                          ? place_values(bytes, matrix, first, count, packed)
                          : place_any(bytes, tensor, factor, first, count, Target(matrix, packed));
  return bad == kNone ? -1 : bad;
}

CodedRows gate_up_rows(const CodedTensor& tensor, GateUp split, const ExpertMatrix& matrix) {
  const CodedRows one = coded_rows(tensor, matrix);
  const bool by_output = one.rows == matrix.rows && tensor.kind != CodedKind::ValuesByInput;
  if ((split == GateUp::RowsAlternate) != by_output) {
    throw Error(ErrorKind::Shape, "gate and up cannot stand in one tensor like that");
  }
  if (by_output) return {2 * one.rows, one.row_bytes, one.row_values, 2 * one.granule};
  return {one.rows, 2 * one.row_bytes, 2 * one.row_values, one.granule};
}

int32_t gate_up_at(GateUp split, int32_t row_values, int64_t index) {
  switch (split) {
    case GateUp::RowsAlternate:
      return static_cast<int32_t>(index / row_values % 2);
    case GateUp::HalvesOfRow:
      return index % row_values < row_values / 2 ? 0 : 1;
    case GateUp::ColumnsAlternate:
      return static_cast<int32_t>(index % row_values % 2);
  }
  return 0;
}

int64_t place_gate_up(const std::byte* source, const CodedTensor& tensor, GateUp split,
                      float factor, const ExpertMatrix& matrix, int32_t first, int32_t count,
                      std::byte* gate, std::byte* up) {
  const CodedRows one = coded_rows(tensor, matrix);
  const bool by_rows = split == GateUp::RowsAlternate;
  // What alternates, and how many of them.
  const int64_t piece =
      split == GateUp::ColumnsAlternate ? one.row_bytes / one.row_values : one.row_bytes;
  const int64_t pieces = (by_rows ? count / 2 : count) * (one.row_bytes / piece);
  thread_local std::vector<std::byte> scratch;
  scratch.resize(static_cast<size_t>(pieces * piece));
  int64_t found = -1;
  for (int64_t half = 0; half < 2; ++half) {
    for (int64_t i = 0; i < pieces; ++i) {
      std::memcpy(scratch.data() + i * piece, source + (2 * i + half) * piece,
                  static_cast<size_t>(piece));
    }
    const int64_t bad =
        place_coded(scratch.data(), tensor, factor, matrix, by_rows ? first / 2 : first,
                    by_rows ? count / 2 : count, half == 0 ? gate : up);
    if (bad < 0) continue;
    const int64_t values = split == GateUp::ColumnsAlternate ? 1 : one.row_values;
    const int64_t index = (2 * (bad / values) + half) * values + bad % values;
    found = found < 0 ? index : std::min(found, index);
  }
  return found;
}

void finish_coded(const ExpertMatrix& matrix, std::byte* packed) {
  if (matrix.format != Format::Q4A) return;
  const Target target(matrix, packed);
  for (int32_t block = 0; block < target.blocks; ++block) {
    for (int32_t g = 0; g < target.groups; ++g) {
      uint8_t* to = target.at(block, g) + target.scales_at;
      float scales[kBlockOutputs], zeros[kBlockOutputs];
      std::memcpy(scales, to, sizeof scales);
      std::memcpy(zeros, to + kMinimumsAt, sizeof zeros);
      for (int32_t i = 0; i < kBlockOutputs; ++i) zeros[i] = -zeros[i] * scales[i];
      std::memcpy(to + kMinimumsAt, zeros, sizeof zeros);
    }
  }
}

}  // namespace headrace
