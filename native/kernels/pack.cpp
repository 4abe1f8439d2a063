#include "kernels/pack.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/error.h"
#include "kernels/small_float.h"

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

// ---- one group of one output: values in, integer codes and the scale's bits out

struct GroupCodes {
  int8_t codes[64];
  uint16_t scale;  // float16 bits, or an E8M0 byte
};

int8_t rounded_code(float weight, float scale, float low, float high) {
  if (scale == 0.0f) return 0;
  return static_cast<int8_t>(std::lrint(std::clamp(weight / scale, low, high)));
}

// The scale carries the sign of the largest weight, so that it lands on -8, the code without a
// twin.
void quantise_q4(const float* weights, int32_t group, GroupCodes& out) {
  float extreme = 0.0f;
  for (int32_t i = 0; i < group; ++i) {
    if (std::fabs(weights[i]) > std::fabs(extreme)) extreme = weights[i];
  }
  out.scale = f16_from_float(extreme / -8.0f);
  const float scale = float_from_f16(out.scale);
  for (int32_t i = 0; i < group; ++i) out.codes[i] = rounded_code(weights[i], scale, -8.0f, 7.0f);
}

void quantise_q8(const float* weights, int32_t group, GroupCodes& out) {
  float largest = 0.0f;
  for (int32_t i = 0; i < group; ++i) largest = std::max(largest, std::fabs(weights[i]));
  out.scale = f16_from_float(largest / 127.0f);
  const float scale = float_from_f16(out.scale);
  for (int32_t i = 0; i < group; ++i) {
    out.codes[i] = rounded_code(weights[i], scale, -127.0f, 127.0f);
  }
}

// Nearest e2m1 magnitude of a value >= 0, ties to the even code; saturates at 6.
int8_t e2m1_code(float value) {
  constexpr float kUpper[7] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};
  int8_t code = 0;
  for (int i = 0; i < 7; ++i) {
    const bool tie_goes_up = i % 2 == 1;  // the code above, i + 1, is the even one
    if (value > kUpper[i] || (value == kUpper[i] && tie_goes_up)) code = static_cast<int8_t>(i + 1);
  }
  return code;
}

// Source: OCP Microscaling Formats v1.0, section 6.3: shared exponent floor(log2(amax)) -
// emax(e2m1) = 2.
void quantise_mxfp4(const float* weights, int32_t group, GroupCodes& out) {
  float largest = 0.0f;
  for (int32_t i = 0; i < group; ++i) largest = std::max(largest, std::fabs(weights[i]));
  const int exponent = largest == 0.0f ? -127 : std::clamp(std::ilogb(largest) - 2, -127, 127);
  out.scale = static_cast<uint16_t>(exponent + 127);
  for (int32_t i = 0; i < group; ++i) {
    // Exact in double for every float and exponent.
    const double scaled = std::ldexp(static_cast<double>(std::fabs(weights[i])), -exponent);
    const int8_t code = e2m1_code(static_cast<float>(std::min(scaled, 8.0)));
    out.codes[i] = static_cast<int8_t>(weights[i] < 0.0f && code != 0 ? code | 8 : code);
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

void place_group(Format format, int32_t group, int32_t output, const GroupCodes& codes,
                 uint8_t* packed) {
  for (int32_t k = 0; k < group; ++k) {
    const int32_t vector = k / 4;
    const int32_t byte = output * 4 + k % 4;
    if (format == Format::Q8) {
      packed[vector * 64 + byte] = static_cast<uint8_t>(codes.codes[k]);
      continue;
    }
    const uint8_t nibble =
        static_cast<uint8_t>(format == Format::Q4 ? codes.codes[k] + 8 : codes.codes[k]);
    uint8_t& target = packed[vector / 2 * 64 + byte];
    target = static_cast<uint8_t>(vector % 2 == 0 ? (target & 0xf0) | nibble
                                                  : (target & 0x0f) | nibble << 4);
  }
  uint8_t* scales = packed + (format == Format::Q8 ? group * 16 : group * 8);
  if (format == Format::MXFP4) {
    scales[output] = static_cast<uint8_t>(codes.scale);
  } else {
    std::memcpy(scales + output * 2, &codes.scale, 2);
  }
}

// Reports the first bad weight in row order, whichever thread saw it.
class FirstBad {
 public:
  void report(int64_t index) {
    int64_t seen = index_.load();
    while (index < seen && !index_.compare_exchange_weak(seen, index)) {
    }
  }
  void throw_if_any(const RowMajor& source, const std::string& name) const {
    const int64_t index = index_.load();
    if (index == kNone) return;
    const float value = weight_at(source.data, source.dtype, index);
    throw Error(ErrorKind::Checkpoint,
                "weight cannot be packed: tensor " + (name.empty() ? "(unnamed)" : name) +
                    ", index [" + std::to_string(index / source.cols) + ", " +
                    std::to_string(index % source.cols) + "]\nexpected a finite number" +
                    (std::isfinite(value) ? " whose scale fits float16" : "") + ", got " +
                    std::to_string(value));
  }

 private:
  static constexpr int64_t kNone = INT64_MAX;
  std::atomic<int64_t> index_{kNone};
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
      for (int32_t k = 0; k < group; ++k) {
        const int64_t col = g * group + k;
        const bool inside = row < source.rows && col < source.cols;
        const int64_t index = row * source.cols + col;
        weights[k] = inside ? weight_at(source.data, source.dtype, index) : 0.0f;
        if (!std::isfinite(weights[k])) {
          bad.report(index);
          weights[k] = 0.0f;
        }
      }
      quantise_group(format, weights, group, codes);
      if (format != Format::MXFP4 && (codes.scale & 0x7c00u) == 0x7c00u) {
        bad.report(row * source.cols + g * group);
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

template <class T>
void interleave_block(const T* source, int32_t rows, int32_t cols, T* packed) {
  for (int32_t k = 0; k < cols; ++k) {
    for (int32_t output = 0; output < kBlockOutputs; ++output) {
      packed[int64_t{k} * kBlockOutputs + output] =
          output < rows ? source[int64_t{output} * cols + k] : T{};
    }
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

template <class T>
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
    interleave_block(values, count, cols, reinterpret_cast<T*>(packed) + offset);
  }
  return bad;
}

// ---- reading codes back

// Twice the e2m1 values, as the integer kernels use them with half the scale.
constexpr int8_t kDoubledE2m1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

float real_value(Format format, int32_t group, const uint8_t* packed, int32_t output, int32_t k) {
  const int32_t vector = k / 4;
  const int32_t byte = output * 4 + k % 4;
  if (format == Format::Q8) {
    const float scale = float_from_f16(
        load_at<uint16_t>(reinterpret_cast<const std::byte*>(packed + group * 16), output));
    return static_cast<float>(static_cast<int8_t>(packed[vector * 64 + byte])) * scale;
  }
  const uint8_t both = packed[vector / 2 * 64 + byte];
  const int nibble = vector % 2 == 0 ? both & 15 : both >> 4;
  const uint8_t* scales = packed + group * 8;
  if (format == Format::MXFP4) {
    return std::ldexp(static_cast<float>(kDoubledE2m1[nibble]), scales[output] - 128);
  }
  const float scale =
      float_from_f16(load_at<uint16_t>(reinterpret_cast<const std::byte*>(scales), output));
  return static_cast<float>(nibble - 8) * scale;
}

}  // namespace

void pack(ThreadPool& pool, const RowMajor& source, Format format, int32_t group,
          const std::string& name, std::byte* packed) {
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

void unpack_row(const MatrixView& matrix, int32_t row, float* values) {
  const std::byte* block = matrix.data + row / kBlockOutputs * matrix.block_bytes();
  const int32_t output = row % kBlockOutputs;
  const int64_t bytes = group_bytes(matrix.format, matrix.group);
  for (int32_t k = 0; k < matrix.cols; ++k) {
    const std::byte* group = block + k / matrix.group * bytes;
    values[k] = is_quantised(matrix.format)
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
    return interleave_all<uint32_t>(source, 0x7f800000u, rows, cols, packed);
  }
  const uint16_t exponent = dtype == Format::F16 ? 0x7c00u : 0x7f80u;
  return interleave_all<uint16_t>(source, exponent, rows, cols, packed);
}

void widen_row(const std::byte* source, Format dtype, int64_t count, float* values) {
  for (int64_t i = 0; i < count; ++i) values[i] = weight_at(source, dtype, i);
}

}  // namespace headrace
