#include "kernels/pack.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/error.h"
#include "base/first_index.h"
#include "kernels/place.h"
#include "kernels/small_float.h"
#include "kernels/words.h"

namespace headrace {
namespace {

template <class T>
T load_at(const std::byte* data, int64_t index) {
  T value;
  std::memcpy(&value, data + index * static_cast<int64_t>(sizeof(T)), sizeof(T));
  return value;
}

float weight_at(const std::byte* data, Format dtype, int64_t index) {
  switch (dtype) {
    case Format::F32:
      return load_at<float>(data, index);
    case Format::F16:
      return float_from_f16(load_at<uint16_t>(data, index));
    default:
      return float_from_bf16(load_at<uint16_t>(data, index));
  }
}

// ---- a run of one row, widened

template <class T, class Widen>
void widen(const std::byte* data, int64_t index, int32_t count, Widen&& value, float* out) {
  for (int32_t k = 0; k < count; ++k) out[k] = value(load_at<T>(data, index + k));
}

void load_run(const RowMajor& source, int64_t index, int32_t count, float* out) {
  switch (source.dtype) {
    case Format::F32:
      return widen<float>(source.data, index, count, [](float x) { return x; }, out);
    case Format::F16:
      return widen<uint16_t>(source.data, index, count, float_from_f16, out);
    default:
      return widen<uint16_t>(source.data, index, count, float_from_bf16, out);
  }
}

// By exponent bits and without a branch per weight, so that the loop stays one of vectors.
bool is_all_finite(const float* weights, int32_t count) {
  uint32_t is_bad = 0;
  for (int32_t k = 0; k < count; ++k) {
    const uint32_t bits = load_at<uint32_t>(reinterpret_cast<const std::byte*>(weights), k);
    is_bad |= static_cast<uint32_t>((bits & 0x7f800000u) == 0x7f800000u);
  }
  return is_bad == 0;
}

// ---- one group of one output: values in, codes and the scale's bits out

struct GroupCodes {
  uint8_t codes[64];  // q8: int8; the others: a nibble each
  uint16_t scale;     // float16 bits, or an E8M0 byte
};

uint32_t magnitude_bits(float weight) {
  return load_at<uint32_t>(reinterpret_cast<const std::byte*>(&weight), 0) & 0x7fffffffu;
}

// The largest magnitude. Bits of positive floats order as integers do, and a maximum of integers is
// one of vectors under any compiler flags.
float largest_magnitude(const float* weights, int32_t group) {
  int32_t largest = 0;
  for (int32_t i = 0; i < group; ++i) {
    largest = std::max(largest, static_cast<int32_t>(magnitude_bits(weights[i])));
  }
  return load_at<float>(reinterpret_cast<const std::byte*>(&largest), 0);
}

// Codes rounded half to even and held inside low..high, plus `offset`. Adding 1.5 * 2^23 leaves a
// float no bits below one, so that it rounds by itself and the code is in its low bits: exact,
// since no quotient is far outside the codes.
void round_codes(const float* weights, int32_t group, float scale, int32_t low, int32_t high,
                 int32_t offset, uint8_t* codes) {
  constexpr float kMagic = 12582912.0f;
  constexpr int32_t kMagicBits = 0x4b400000;
  if (scale == 0.0f) return void(std::fill_n(codes, group, static_cast<uint8_t>(offset)));
  for (int32_t i = 0; i < group; ++i) {
    const float shifted = weights[i] / scale + kMagic;
    int32_t bits;
    std::memcpy(&bits, &shifted, 4);
    codes[i] = static_cast<uint8_t>(std::clamp(bits - kMagicBits, low, high) + offset);
  }
}

// The scale carries the sign of the largest weight, so that it lands on -8, the code without a
// twin.
void quantise_q4(const float* weights, int32_t group, GroupCodes& out) {
  const float largest = largest_magnitude(weights, group);
  int32_t at = 0;
  while (std::fabs(weights[at]) != largest) ++at;
  out.scale = f16_from_float(weights[at] / -8.0f);
  round_codes(weights, group, float_from_f16(out.scale), -8, 7, 8, out.codes);
}

void quantise_q8(const float* weights, int32_t group, GroupCodes& out) {
  out.scale = f16_from_float(largest_magnitude(weights, group) / 127.0f);
  round_codes(weights, group, float_from_f16(out.scale), -127, 127, 0, out.codes);
}

// Nearest e2m1 magnitude of a value >= 0, ties to the even code; saturates at 6. A code is the
// number of borders below the value; a border belongs to the even one of its two codes.
uint8_t e2m1_code(float value) {
  return static_cast<uint8_t>((value > 0.25f) + (value >= 0.75f) + (value > 1.25f) +
                              (value >= 1.75f) + (value > 2.5f) + (value >= 3.5f) + (value > 5.0f));
}

// Source: OCP Microscaling Formats v1.0, section 6.3: shared exponent floor(log2(amax)) -
// emax(e2m1) = 2.
void quantise_mxfp4(const float* weights, int32_t group, GroupCodes& out) {
  const float largest = largest_magnitude(weights, group);
  const int exponent = largest == 0.0f ? -127 : std::clamp(std::ilogb(largest) - 2, -127, 127);
  out.scale = static_cast<uint16_t>(exponent + 127);
  const double factor = std::ldexp(1.0, -exponent);
  for (int32_t i = 0; i < group; ++i) {
    // Exact in double for every float and exponent, and at most 8.
    const float scaled = static_cast<float>(static_cast<double>(std::fabs(weights[i])) * factor);
    const uint8_t code = e2m1_code(scaled);
    out.codes[i] = static_cast<uint8_t>(code | (weights[i] < 0.0f && code != 0) << 3);
  }
}

void quantise_group(Format format, const float* weights, int32_t group, GroupCodes& out) {
  switch (format) {
    case Format::Q4:
      return quantise_q4(weights, group, out);
    case Format::Q8:
      return quantise_q8(weights, group, out);
    default:
      return quantise_mxfp4(weights, group, out);
  }
}

// ---- placing codes

uint32_t four_codes(const uint8_t* codes) {
  return load_at<uint32_t>(reinterpret_cast<const std::byte*>(codes), 0);
}

// Four codes of one output are neighbours in a vector of 64 bytes; of a nibble format, eight share
// four bytes.
void place_group(Format format, int32_t group, int32_t output, const GroupCodes& codes,
                 uint8_t* packed) {
  const bool is_nibbles = format != Format::Q8;
  const int32_t step = is_nibbles ? 8 : 4;
  for (int32_t k = 0; k < group; k += step) {
    uint32_t word = four_codes(codes.codes + k);
    if (is_nibbles) word |= four_codes(codes.codes + k + 4) << 4;
    std::memcpy(packed + k / step * 64 + output * 4, &word, 4);
  }
  uint8_t* scales = packed + (is_nibbles ? group * 8 : group * 16);
  if (format == Format::MXFP4) {
    scales[output] = static_cast<uint8_t>(codes.scale);
  } else {
    std::memcpy(scales + output * 2, &codes.scale, 2);
  }
}

std::string place_of(const std::string& name, int64_t row, int64_t column) {
  return "tensor " + (name.empty() ? "(unnamed)" : name) + ", index [" + std::to_string(row) +
         ", " + std::to_string(column) + "]";
}

// Reports the first bad weight in row order.
class FirstBad {
 public:
  void report(int64_t index) { first_.report(index); }
  void throw_if_any(const RowMajor& source, const std::string& name) const {
    const int64_t index = first_.get();
    if (index == FirstIndex::kNone) return;
    const float value = weight_at(source.data, source.dtype, index);
    throw Error(
        ErrorKind::Checkpoint,
        "weight cannot be packed: " + place_of(name, index / source.cols, index % source.cols) +
            "\nexpected a finite number" +
            (std::isfinite(value) ? " whose scale fits float16" : "") + ", got " +
            std::to_string(value));
  }

 private:
  FirstIndex first_;
};

void pack_quantised_block(const RowMajor& source, Format format, int32_t group, int64_t block,
                          FirstBad& bad, uint8_t* packed) {
  const int64_t groups = num_groups(source.cols, group);
  const int64_t bytes = group_bytes(format, group);
  float weights[64];
  GroupCodes codes;
  for (int32_t output = 0; output < kBlockOutputs; ++output) {
    const int64_t row = block * kBlockOutputs + output;
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t first = row * source.cols + g * group;
      const int64_t left = row < source.rows ? source.cols - g * group : 0;
      const int32_t count = static_cast<int32_t>(std::min<int64_t>(left, group));
      load_run(source, first, count, weights);
      std::fill(weights + count, weights + group, 0.0f);
      if (!is_all_finite(weights, count)) {
        const auto is_bad = [](float weight) { return !std::isfinite(weight); };
        bad.report(first + (std::find_if(weights, weights + count, is_bad) - weights));
        std::replace_if(weights, weights + count, is_bad, 0.0f);
      }
      quantise_group(format, weights, group, codes);
      if (format != Format::MXFP4 && (codes.scale & 0x7c00u) == 0x7c00u) {
        bad.report(first);
      }
      place_group(format, group, output, codes, packed + g * bytes);
    }
  }
}

void pack_float_block(const RowMajor& source, Format format, int64_t block, FirstBad& bad,
                      std::byte* packed) {
  for (int32_t k = 0; k < source.cols; ++k) {
    for (int32_t output = 0; output < kBlockOutputs; ++output) {
      const int64_t row = block * kBlockOutputs + output;
      const int64_t index = row * source.cols + k;
      const float weight = row < source.rows ? weight_at(source.data, source.dtype, index) : 0.0f;
      if (!std::isfinite(weight)) bad.report(index);
      const int64_t at = int64_t{k} * kBlockOutputs + output;
      if (format == Format::F32) {
        std::memcpy(packed + at * 4, &weight, 4);
        continue;
      }
      const uint16_t bits =
          format == Format::F16 ? f16_from_float(weight) : bf16_from_float(weight);
      const uint16_t exponent = format == Format::F16 ? 0x7c00u : 0x7f80u;
      if ((bits & exponent) == exponent) bad.report(index);
      std::memcpy(packed + at * 2, &bits, 2);
    }
  }
}

// A line of the cache of each output at a time: rows lie so far apart that sixteen lines are more
// than stay in the first cache, so each is taken whole.
template <class T, class V>
void interleave_block(const T* source, int32_t rows, int32_t cols, T* packed) {
  constexpr int32_t kLine = 64 / sizeof(T), kItems = 16 / sizeof(T);
  alignas(64) T lines[kBlockOutputs][kLine] = {};  // 0 beyond the last row
  alignas(64) T turned[kLine * kBlockOutputs];
  for (int32_t k = 0; k < cols; k += kLine) {
    const bool is_whole = cols - k >= kLine;
    const size_t bytes = is_whole ? sizeof lines[0] : static_cast<size_t>(cols - k) * sizeof(T);
    for (int32_t output = 0; output < rows; ++output) {
      std::memcpy(lines[output], source + int64_t{output} * cols + k, bytes);
    }
    T* const to = is_whole ? packed + int64_t{k} * kBlockOutputs : turned;
    for (int32_t first = 0; first < kLine; first += kItems) {
      for (int32_t output = 0; output < kBlockOutputs; output += kItems) {
        V items[kItems];
        for (int32_t i = 0; i < kItems; ++i) {
          std::memcpy(&items[i], &lines[output + i][first], sizeof items[i]);
        }
        transpose(items);
        for (int32_t i = 0; i < kItems; ++i) {
          std::memcpy(to + (first + i) * kBlockOutputs + output, &items[i], sizeof items[i]);
        }
      }
    }
    if (!is_whole) std::memcpy(packed + int64_t{k} * kBlockOutputs, turned, bytes * kBlockOutputs);
  }
}

// Index of the first NaN or infinity, or -1. Both have all exponent bits set, so that adding the
// lowest of them carries into the sign, which is masked away before: three integer operations per
// value and no branch, which compilers turn into vectors of any instruction set.
template <class T>
int64_t first_not_finite(const T* values, int64_t count, T exponent) {
  const T magnitude = static_cast<T>(~(T{1} << (8 * sizeof(T) - 1)));
  const T step = static_cast<T>(exponent & -exponent);
  T carried = 0;
  for (int64_t i = 0; i < count; ++i) {
    carried = static_cast<T>(carried | static_cast<T>((values[i] & magnitude) + step));
  }
  if ((carried & ~magnitude) == 0) return -1;
  return std::find_if(values, values + count,
                      [&](T value) { return (value & exponent) == exponent; }) -
         values;
}

template <class T, class V>
int64_t interleave_all(const std::byte* source, T exponent, int32_t rows, int32_t cols,
                       std::byte* packed) {
  int64_t bad = -1;
  for (int64_t block = 0; block < num_blocks(rows); ++block) {
    const int64_t offset = block * kBlockOutputs * cols;
    const int32_t count =
        std::min<int32_t>(kBlockOutputs, rows - static_cast<int32_t>(block) * kBlockOutputs);
    const T* values = reinterpret_cast<const T*>(source) + offset;
    const int64_t found = first_not_finite(values, int64_t{count} * cols, exponent);
    if (bad < 0 && found >= 0) bad = offset + found;
    interleave_block<T, V>(values, count, cols, reinterpret_cast<T*>(packed) + offset);
  }
  return bad;
}

// ---- reading codes back

uint8_t code_at(Format format, const uint8_t* group, int32_t output, int32_t k) {
  if (format == Format::F8) return group[k * kBlockOutputs + output];
  const int32_t vector = k / 4;
  const int32_t byte = output * 4 + k % 4;
  if (!is_nibbles(format)) return group[vector * 64 + byte];
  const uint8_t both = group[vector / 2 * 64 + byte];
  return static_cast<uint8_t>(vector % 2 == 0 ? both & 15 : both >> 4);
}

float scale_at(Format format, const std::byte* scales, int32_t output) {
  if (format == Format::Q8 || format == Format::Q4) {
    return float_from_f16(load_at<uint16_t>(scales, output));
  }
  return load_at<float>(scales, output);
}

float real_value(Format format, int32_t group, const uint8_t* packed, int32_t output, int32_t k) {
  const uint8_t code = code_at(format, packed, output, k);
  const auto* scales = reinterpret_cast<const std::byte*>(packed + code_bytes(format, group));
  if (format == Format::MXFP4) {
    const int exponent = static_cast<int>(scales[output]) - 128;
    return std::ldexp(static_cast<float>(kDoubledE2m1[code]), exponent);
  }
  const float scale = scale_at(format, scales, output);
  if (format == Format::F8) return e4m3_times(code, scale);
  if (format == Format::Q4A) {
    return static_cast<float>(code) * scale + load_at<float>(scales, kBlockOutputs + output);
  }
  if (is_nibbles(format)) return static_cast<float>(code - 8) * scale;
  const float product = static_cast<float>(static_cast<int8_t>(code)) * scale;
  return format == Format::Q8A ? product + load_at<float>(scales, kBlockOutputs + output) : product;
}

// Bits of vector j in a plane of `bits` bits.
uint8_t plane_code(const uint8_t* plane, int32_t bits, int32_t j, int32_t byte) {
  if (bits == 0) return 0;
  const int32_t together = 8 / bits;
  const int32_t shifted = plane[j / together * 64 + byte] >> (j % together * bits);
  return static_cast<uint8_t>(shifted & ((1 << bits) - 1));
}

float super_value(Format format, int32_t group, const std::byte* packed, int32_t output,
                  int32_t k) {
  const SuperLayout layout = super_layout(format, group);
  const CodePlanes planes = code_planes(format);
  const auto* bytes = reinterpret_cast<const uint8_t*>(packed);
  const int32_t j = k / 4, byte = output * 4 + k % 4;
  const int32_t code = plane_code(bytes + layout.low, planes.low_bits, j, byte) |
                       plane_code(bytes + layout.high, planes.high_bits, j, byte)
                           << planes.low_bits;
  const auto number = [&](int32_t units, int32_t multiples) {
    const auto multiple = load_at<int8_t>(packed + multiples, k / group * kBlockOutputs + output);
    return float_from_f16(load_at<uint16_t>(packed + units, output)) * static_cast<float>(multiple);
  };
  const float product = static_cast<float>(code - planes.offset) * number(0, layout.multiples);
  if (!planes.has_minimum) return product;
  return product + number(layout.minimum_units, layout.minimum_multiples);
}

// ---- codes from elsewhere

// The range of a code's byte as its format reads it; whole bytes if there is none to keep to.
struct CodeRange {
  int32_t low, high;
  int32_t of(uint8_t byte) const { return low < 0 ? static_cast<int8_t>(byte) : byte; }
};

CodeRange range_of(Format format) {
  if (format == Format::Q4 || format == Format::Q4F) return {-8, 7};
  if (format == Format::Q4A || format == Format::MXFP4) return {0, 15};
  return format == Format::F8 ? CodeRange{0, 255} : CodeRange{-128, 127};
}

// Blocks of codes, packed on any thread; what is bad is told once all are.
class CodePacker {
 public:
  CodePacker(const RowMajorCodes& source, Format format, int32_t group)
      : source_(source),
        format_(format),
        group_(group),
        groups_(static_cast<int32_t>(num_groups(source.cols, group))) {}

  void pack_block(int64_t block, std::byte* packed) {
    const int64_t width = int64_t{groups_} * group_;
    std::vector<uint8_t> codes(static_cast<size_t>(width * kBlockOutputs));
    // Rows that do not exist: zeros, in mxfp4 of its least scale.
    const float no_scale = format_ == Format::MXFP4 ? 0x1p-127f : 0.0f;
    std::vector<float> scales(static_cast<size_t>(groups_ * kBlockOutputs), no_scale);
    std::vector<float> minimums(has_minimum(format_) ? scales.size() : 0);
    const int64_t first = block * kBlockOutputs;
    for (int64_t i = 0; i < kBlockOutputs && first + i < source_.rows; ++i) {
      const int64_t row = first + i;
      check_codes(row);
      std::copy_n(source_.codes + row * source_.cols, source_.cols, codes.data() + i * width);
      std::copy_n(source_.scales + row * groups_, groups_, scales.data() + i * groups_);
      if (has_minimum(format_)) {
        std::copy_n(source_.minimums + row * groups_, groups_, minimums.data() + i * groups_);
      }
    }
    const CodeBand band{codes.data(), width, scales.data(), minimums.data(), groups_};
    const int64_t bad = place_groups(format_, group_, groups_, band, packed);
    if (bad >= 0) bad_scale_.report(first * groups_ + bad);
  }

  void throw_if_bad(const std::string& name) const {
    if (const int64_t at = bad_code_.get(); at != FirstIndex::kNone) {
      const CodeRange range = range_of(format_);
      const int32_t code = range.of(source_.codes[at]);
      throw Error(ErrorKind::Checkpoint,
                  "code cannot be packed: " + place_of(name, at / source_.cols, at % source_.cols) +
                      "\nexpected " + std::to_string(range.low) + " to " +
                      std::to_string(range.high) + " in format " + format_name(format_) + ", got " +
                      (format_ == Format::F8 ? "NaN" : std::to_string(code)));
    }
    if (const int64_t at = bad_scale_.get(); at != FirstIndex::kNone) {
      throw Error(ErrorKind::Checkpoint,
                  "scale cannot be packed: " + place_of(name, at / groups_, at % groups_ * group_) +
                      "\nexpected finite numbers that format " + format_name(format_) +
                      " holds exactly, got " + std::to_string(source_.scales[at]) +
                      (has_minimum(format_) ? " and " + std::to_string(source_.minimums[at]) : ""));
    }
  }

 private:
  void check_codes(int64_t row) {
    const CodeRange range = range_of(format_);
    for (int64_t at = row * source_.cols; at < (row + 1) * source_.cols; ++at) {
      const int32_t code = range.of(source_.codes[at]);
      const bool is_nan = format_ == Format::F8 && (code & 0x7f) == 0x7f;
      if (code < range.low || code > range.high || is_nan) bad_code_.report(at);
    }
  }

  const RowMajorCodes& source_;
  Format format_;
  int32_t group_, groups_;
  FirstIndex bad_code_, bad_scale_;
};

bool can_round_to(Format format) { return format <= Format::MXFP4; }

}  // namespace

void pack(ThreadPool& pool, const RowMajor& source, Format format, int32_t group,
          const std::string& name, std::byte* packed) {
  if (!can_round_to(format)) {
    throw Error(ErrorKind::Config,
                std::string("weights are not rounded to format ") + format_name(format) +
                    "\nexpected f32, f16, bf16, q8, q4 or mxfp4: the others hold codes as found");
  }
  FirstBad bad;
  const int64_t bytes = block_bytes(format, source.cols, group);
  pool.run(num_blocks(source.rows), [&](int64_t block) {
    std::byte* target = packed + block * bytes;
    if (is_quantised(format)) {
      pack_quantised_block(source, format, group, block, bad, reinterpret_cast<uint8_t*>(target));
    } else {
      pack_float_block(source, format, block, bad, target);
    }
  });
  bad.throw_if_any(source, name);
}

void pack_codes(ThreadPool& pool, const RowMajorCodes& source, Format format, int32_t group,
                const std::string& name, std::byte* packed) {
  if (!has_groups(format) || has_multiples(format)) {
    throw Error(ErrorKind::Config, std::string("format ") + format_name(format) +
                                       " holds no codes with a float scale for each group");
  }
  CodePacker packer(source, format, group);
  const int64_t bytes = block_bytes(format, source.cols, group);
  pool.run(num_blocks(source.rows),
           [&](int64_t block) { packer.pack_block(block, packed + block * bytes); });
  packer.throw_if_bad(name);
}

void unpack_row(const MatrixView& matrix, int32_t row, float* values) {
  const std::byte* block = matrix.data + row / kBlockOutputs * matrix.block_bytes();
  const int32_t output = row % kBlockOutputs;
  if (has_multiples(matrix.format)) {
    const int64_t step = super_layout(matrix.format, matrix.group).nbytes;
    for (int32_t k = 0; k < matrix.cols; ++k) {
      values[k] = super_value(matrix.format, matrix.group, block + k / kSuperInputs * step, output,
                              k % kSuperInputs);
    }
    return;
  }
  const int64_t bytes = group_bytes(matrix.format, matrix.group);
  for (int32_t k = 0; k < matrix.cols; ++k) {
    const std::byte* group = block + k / matrix.group * bytes;
    values[k] = has_groups(matrix.format)
                    ? real_value(matrix.format, matrix.group,
                                 reinterpret_cast<const uint8_t*>(group), output, k % matrix.group)
                    : weight_at(group, matrix.format, output);
  }
}

void unpack(ThreadPool& pool, const MatrixView& matrix, float* values) {
  pool.run(matrix.rows, [&](int64_t row) {
    unpack_row(matrix, static_cast<int32_t>(row), values + row * matrix.cols);
  });
}

int64_t interleave_rows(const std::byte* source, Format dtype, int32_t rows, int32_t cols,
                        std::byte* packed) {
  if (dtype == Format::F32) {
    return interleave_all<uint32_t, Words4>(source, 0x7f800000u, rows, cols, packed);
  }
  const uint16_t exponent = dtype == Format::F16 ? 0x7c00u : 0x7f80u;
  return interleave_all<uint16_t, Halves8>(source, exponent, rows, cols, packed);
}

}  // namespace headrace
