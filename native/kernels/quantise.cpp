#include "kernels/quantise.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <vector>

#include "base/error.h"
#include "kernels/kernel_table.h"
#include "kernels/small_float.h"

namespace headrace {
namespace {

// Where the largest weight may land. Finer steps and the other sign were tried on trained weights
// and gained less than 0.1 % of the error.
constexpr float kQ4Others[] = {-6.0f,  -6.25f, -6.5f, -6.75f, -7.0f, -7.25f, -7.5f,
                               -7.75f, -8.25f, -8.5f, -8.75f, -9.0f, -9.25f, -9.5f};
constexpr float kQ8Others[] = {120.0f, 121.0f, 122.0f, 123.0f, 124.0f, 125.0f, 126.0f,
                               128.0f, 129.0f, 130.0f, 131.0f, 132.0f, 133.0f, 134.0f};
constexpr IntegerSearch kQ4Search{-8.0f, 7.0f, true, -8.0f, kQ4Others, std::size(kQ4Others), 2};
constexpr IntegerSearch kQ8Search{-127.0f, 127.0f, false, 127.0f, kQ8Others, std::size(kQ8Others),
                                  2};

// The sums of one block of 16 outputs, added up later in the order of blocks.
struct BlockLoss {
  double squared_error = 0.0, squares = 0.0;
};

// The rows of a block, widened; outputs beyond the last are zero.
class BlockRows {
 public:
  BlockRows(const RowMajor& source, int64_t block)
      : cols_(source.cols), values_(static_cast<size_t>(kBlockOutputs) * source.cols, 0.0f) {
    const int64_t item = source.dtype == Format::F32 ? 4 : 2;
    for (int32_t output = 0; output < kBlockOutputs; ++output) {
      const int64_t row = block * kBlockOutputs + output;
      if (row >= source.rows) break;
      kernels().widen(source.dtype, source.data + row * cols_ * item, cols_,
                      values_.data() + output * cols_);
    }
  }

  // [group][16]; inputs beyond the last are zero.
  void take_group(int64_t first, int32_t group, float* out) const {
    const int32_t count = static_cast<int32_t>(std::min<int64_t>(group, cols_ - first));
    std::fill(out, out + group * kBlockOutputs, 0.0f);
    for (int32_t output = 0; output < kBlockOutputs; ++output) {
      const float* row = values_.data() + output * cols_ + first;
      for (int32_t k = 0; k < count; ++k) out[k * kBlockOutputs + output] = row[k];
    }
  }

 private:
  int64_t cols_;
  std::vector<float> values_;
};

// Whether every weight is finite and, for `largest_code`, its plain scale rounds to a float16.
bool is_packable(const float* weights, int32_t count, float largest_code) {
  const float limit =
      largest_code == 0.0f ? std::numeric_limits<float>::infinity() : 65520.0f * largest_code;
  bool is_good = true;
  for (int32_t i = 0; i < count; ++i) is_good &= std::fabs(weights[i]) < limit;
  return is_good;
}

void place(Format format, int32_t group, const FoundCodes& found, uint8_t* packed) {
  const bool is_nibbles = format != Format::Q8;
  const int32_t offset = format == Format::Q4 ? 8 : 0;
  for (int32_t k = 0; k < group; ++k) {
    const int32_t vector = k / 4;
    uint8_t* bytes = packed + (is_nibbles ? vector / 2 : vector) * 64 + k % 4;
    const bool is_high = is_nibbles && vector % 2 == 1;
    for (int32_t output = 0; output < kBlockOutputs; ++output) {
      const auto code = static_cast<uint8_t>(found.codes[k * kBlockOutputs + output] + offset);
      uint8_t& byte = bytes[output * 4];
      byte = is_high ? static_cast<uint8_t>(byte | code << 4) : code;
    }
  }
  uint8_t* scales = packed + (is_nibbles ? group * 8 : group * 16);
  for (int32_t output = 0; output < kBlockOutputs; ++output) {
    if (format == Format::MXFP4) {
      scales[output] = static_cast<uint8_t>(std::ilogb(found.scales[output]) + 127);
    } else {
      const uint16_t bits = f16_from_float(found.scales[output]);
      std::memcpy(scales + output * 2, &bits, 2);
    }
  }
}

// False if a weight cannot be packed.
bool quantise_block(const RowMajor& source, Format format, int32_t group, const float* importance,
                    int64_t block, uint8_t* packed, BlockLoss& loss) {
  const BlockRows rows(source, block);
  const int64_t bytes = group_bytes(format, group);
  const float largest_code = format == Format::Q4 ? 8.0f : format == Format::Q8 ? 127.0f : 0.0f;
  alignas(64) float weights[64 * kBlockOutputs];
  FoundCodes found;
  for (int64_t g = 0; g < num_groups(source.cols, group); ++g) {
    rows.take_group(g * group, group, weights);
    if (!is_packable(weights, group * kBlockOutputs, largest_code)) return false;
    const SearchGroup searched{weights, importance ? importance + g * group : nullptr, group};
    if (format == Format::MXFP4) {
      kernels().quantise.e2m1(searched, found);
    } else {
      kernels().quantise.integers(searched, format == Format::Q4 ? kQ4Search : kQ8Search, found);
    }
    place(format, group, found, packed + g * bytes);
    for (float error : found.errors) loss.squared_error += static_cast<double>(error);
    for (int32_t i = 0; i < group * kBlockOutputs; ++i) {
      loss.squares += static_cast<double>(weights[i]) * static_cast<double>(weights[i]);
    }
  }
  return true;
}

}  // namespace

bool can_search(Format format) {
  return format == Format::Q4 || format == Format::Q8 || format == Format::MXFP4;
}

QuantiseLoss quantise(ThreadPool& pool, const RowMajor& source, Format format, int32_t group,
                      const float* importance, const std::string& name, std::byte* packed) {
  if (!can_search(format)) {
    throw Error(ErrorKind::Config, std::string("no search for format `") + format_name(format) +
                                       "`\nexpected q4, q8 or mxfp4");
  }
  // Padding inputs have no weight, so what they count does not matter.
  std::vector<float> counts;
  if (importance != nullptr) {
    counts.assign(static_cast<size_t>(num_groups(source.cols, group)) * group, 1.0f);
    std::copy(importance, importance + source.cols, counts.begin());
  }
  const float* padded = importance != nullptr ? counts.data() : nullptr;
  std::vector<BlockLoss> losses(num_blocks(source.rows));
  std::atomic<bool> is_bad{false};
  const int64_t bytes = block_bytes(format, source.cols, group);
  pool.run(num_blocks(source.rows), [&](int64_t block) {
    uint8_t* target = reinterpret_cast<uint8_t*>(packed) + block * bytes;
    if (!quantise_block(source, format, group, padded, block, target, losses[block])) {
      is_bad.store(true);
    }
  });
  // The plain packer refuses the same weights, and names the first.
  if (is_bad.load()) pack(pool, source, format, group, name, packed);
  QuantiseLoss total;
  for (const BlockLoss& loss : losses) {
    total.squared_error += loss.squared_error;
    total.squares += loss.squares;
  }
  return total;
}

}  // namespace headrace
