// What the programs that test the kernels and the thread pool share, beside check.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "base/error.h"
#include "base/thread_pool.h"
#include "check.h"
#include "kernels/format.h"
#include "kernels/pack.h"
#include "kernels/place.h"
#include "kernels/small_float.h"

namespace headrace::test {

// Whether `call` throws a headrace::Error of this kind.
template <class Call>
bool throws(ErrorKind kind, Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.kind() == kind;
  }
  return false;
}

// Numbers from a seed, the same on every platform.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  float centred() {  // [-1, 1)
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<float>(state_ >> 40) * 0x1p-23f - 1.0f;
  }
  std::vector<float> floats(int64_t count) {
    std::vector<float> values(static_cast<size_t>(count));
    for (float& value : values) value = centred();
    return values;
  }

 private:
  uint64_t state_;
};

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

inline std::shared_ptr<std::byte> aligned_bytes(int64_t count) {
  return {static_cast<std::byte*>(::operator new(static_cast<size_t>(count), std::align_val_t{64})),
          [](std::byte* p) { ::operator delete(p, std::align_val_t{64}); }};
}

struct Kind {
  Format format;
  int32_t group;
};
inline constexpr Kind kKinds[] = {
    {Format::F32, 1},  {Format::F16, 1},    {Format::BF16, 1}, {Format::Q8, 32},  {Format::Q4, 32},
    {Format::Q4, 64},  {Format::MXFP4, 32}, {Format::Q8F, 16}, {Format::Q8F, 32}, {Format::Q8A, 16},
    {Format::Q8A, 32}, {Format::Q4F, 32},   {Format::Q4F, 64}, {Format::Q4A, 32}, {Format::Q4A, 64},
    {Format::F8, 32},  {Format::F8, 128},   {Format::Q2K, 16}, {Format::Q3K, 16}, {Format::Q4K, 32},
    {Format::Q5K, 32}, {Format::Q6K, 16},   {Format::Q6KA, 16}};

// Weights as codes of a format that holds those of foreign checkpoints. The codes are found in the
// simplest way, which is as good as any here: what they stand for is what tests compare.
class ForeignCodes {
 public:
  ForeignCodes(const std::vector<float>& w, int32_t rows, int32_t cols, Kind kind)
      : kind_(kind),
        rows_(rows),
        cols_(cols),
        groups_(num_groups(cols, kind.group)),
        codes_(w.size()),
        scales_(static_cast<size_t>(rows * groups_)),
        minimums_(scales_.size()) {
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t g = 0; g < groups_; ++g) round_group(w, row, g);
    }
  }

  RowMajorCodes view() const {
    return {codes_.data(), scales_.data(), has_minimum(kind_.format) ? minimums_.data() : nullptr,
            rows_, cols_};
  }

 private:
  void round_group(const std::vector<float>& w, int64_t row, int64_t g) {
    const size_t first = static_cast<size_t>(row * cols_ + g * kind_.group);
    const size_t count =
        static_cast<size_t>(std::min<int64_t>(kind_.group, cols_ - g * kind_.group));
    float least = 0.0f, most = 0.0f;
    for (size_t i = first; i < first + count; ++i) {
      least = std::min(least, w[i]);
      most = std::max(most, w[i]);
    }
    const float low =
        is_nibbles(kind_.format) ? (kind_.format == Format::Q4A ? 0.0f : -8.0f) : -128.0f;
    const float steps = is_nibbles(kind_.format) ? 15.0f : 255.0f;
    const float scale = (most - least) / steps;
    const float minimum = has_minimum(kind_.format) ? least - low * scale : 0.0f;
    const size_t at = static_cast<size_t>(row * groups_ + g);
    scales_[at] = kind_.format == Format::F8 ? most - least : scale;
    minimums_[at] = minimum;
    for (size_t i = first; i < first + count; ++i) {
      codes_[i] = kind_.format == Format::F8 ? e4m3_below(w[i] / scales_[at])
                                             : code(w[i] - minimum, scale, low, low + steps);
    }
  }

  static uint8_t code(float value, float scale, float low, float high) {
    const float quotient = scale == 0.0f ? 0.0f : std::nearbyint(value / scale);
    return static_cast<uint8_t>(static_cast<int8_t>(std::clamp(quotient, low, high)));
  }

  // The largest e4m3 number not above a magnitude of at most 1, with its sign.
  static uint8_t e4m3_below(float value) {
    if (!(std::fabs(value) <= 1.0f)) return 0;
    uint8_t bits = 0x38;  // 1
    while (e4m3_times(bits, 1.0f) > std::fabs(value)) --bits;
    return static_cast<uint8_t>(bits | (value < 0.0f ? 0x80 : 0));
  }

  Kind kind_;
  int32_t rows_, cols_;
  int64_t groups_;
  std::vector<uint8_t> codes_;
  std::vector<float> scales_, minimums_;
};

// Weights as formats with multiples hold them, rounded in a simple way.
class SuperCodes {
 public:
  SuperCodes(const std::vector<float>& w, int32_t rows, int32_t cols, Kind kind)
      : w_(w), rows_(rows), cols_(cols), kind_(kind), planes_(code_planes(kind.format)) {}

  void place(std::byte* packed) const {
    const int64_t step = super_layout(kind_.format, kind_.group).nbytes;
    for (int64_t block = 0; block < num_blocks(rows_); ++block) {
      for (int64_t first = 0; first < cols_; first += kSuperInputs, packed += step) {
        SuperBand band{};
        for (int64_t output = 0; output < kBlockOutputs; ++output) {
          round(block * kBlockOutputs + output, first, static_cast<size_t>(output), band);
        }
        place_super_group(kind_.format, kind_.group, band, packed);
      }
    }
  }

 private:
  // Zero beyond the matrix.
  float weight(int64_t row, int64_t col) const {
    return row < rows_ && col < cols_ ? w_[static_cast<size_t>(row * cols_ + col)] : 0.0f;
  }

  void round(int64_t row, int64_t first, size_t output, SuperBand& band) const {
    const int32_t codes = 1 << (planes_.low_bits + planes_.high_bits);
    float most = 0.0f;
    for (int64_t k = first; k < first + kSuperInputs; ++k) {
      most = std::max(most, std::fabs(weight(row, k)));
    }
    // With an offset and minimums, an odd middle: else the minimums would be nothing.
    const bool has_both = planes_.has_minimum && planes_.offset != 0;
    const float half = static_cast<float>(has_both ? codes / 2 - 8 : codes / 2);
    const float unit = most / half / 31.0f;
    const float minimum_unit = unit * (static_cast<float>(planes_.offset) - half);
    band.units[output] = f16_from_float(unit);
    band.minimum_units[output] = f16_from_float(planes_.has_minimum ? minimum_unit : 0.0f);
    for (int64_t g = 0; g < kSuperInputs / kind_.group; ++g) {
      float largest = 0.0f;
      for (int64_t k = g * kind_.group; k < (g + 1) * kind_.group; ++k) {
        largest = std::max(largest, std::fabs(weight(row, first + k)));
      }
      const float multiple = most == 0.0f ? 0.0f : std::ceil(largest / most * 31.0f);
      const size_t at = static_cast<size_t>(g);
      band.multiples[output][at] = static_cast<int8_t>(multiple);
      band.minimum_multiples[output][at] =
          static_cast<int8_t>(planes_.has_minimum ? multiple : 0.0f);
      const float scale = multiple * unit;
      for (int64_t k = g * kind_.group; k < (g + 1) * kind_.group; ++k) {
        const float steps = scale == 0.0f ? 0.0f : std::nearbyint(weight(row, first + k) / scale);
        band.codes[output][static_cast<size_t>(k)] =
            static_cast<uint8_t>(std::clamp(steps + half, 0.0f, 2.0f * half - 1.0f));
      }
    }
  }

  const std::vector<float>& w_;
  int32_t rows_, cols_;
  Kind kind_;
  CodePlanes planes_;
};

// Packs weights in any format: rounded as `convert` does, or by ForeignCodes or SuperCodes.
inline void pack_any(ThreadPool& pool, const std::vector<float>& w, int32_t rows, int32_t cols,
                     Kind kind, std::byte* packed) {
  if (has_multiples(kind.format)) {
    SuperCodes(w, rows, cols, kind).place(packed);
  } else if (kind.format >= Format::Q8F) {
    pack_codes(pool, ForeignCodes(w, rows, cols, kind).view(), kind.format, kind.group, "w",
               packed);
  } else {
    const RowMajor source{reinterpret_cast<const std::byte*>(w.data()), Format::F32, rows, cols};
    pack(pool, source, kind.format, kind.group, "w", packed);
  }
}

// Packed bytes at a multiple of 64, in a buffer of exactly their size.
class Packed {
 public:
  Packed(ThreadPool& pool, const std::vector<float>& w, int32_t rows, int32_t cols, Kind kind)
      : bytes_(packed_bytes(kind.format, rows, cols, kind.group)),
        data_(static_cast<std::byte*>(
            ::operator new(static_cast<size_t>(bytes_), std::align_val_t{64}))) {
    pack_any(pool, w, rows, cols, kind, data_);
    view_ = {data_, kind.format, rows, cols, kind.group};
  }
  ~Packed() { ::operator delete(data_, std::align_val_t{64}); }
  Packed(const Packed&) = delete;
  Packed& operator=(const Packed&) = delete;

  const MatrixView& view() const { return view_; }

 private:
  int64_t bytes_;
  std::byte* data_;
  MatrixView view_;
};

// Experts of one format in one buffer each.
struct Experts {
  ExpertLayout layout;
  std::vector<std::unique_ptr<std::byte[], void (*)(std::byte*)>> records;
  std::vector<const std::byte*> pointers;
};

inline Experts make_experts(ThreadPool& pool, Random& random, Kind kind, int32_t hidden,
                            int32_t inner, int32_t count) {
  Experts experts;
  const auto up_to_64 = [](int64_t n) { return (n + 63) / 64 * 64; };
  const int64_t wide = up_to_64(packed_bytes(kind.format, inner, hidden, kind.group));
  const int64_t tall = up_to_64(packed_bytes(kind.format, hidden, inner, kind.group));
  experts.layout = {{kind.format, inner, hidden, kind.group, 0},
                    {kind.format, inner, hidden, kind.group, wide},
                    {kind.format, hidden, inner, kind.group, 2 * wide},
                    2 * wide + tall};
  for (int32_t e = 0; e < count; ++e) {
    auto* record = static_cast<std::byte*>(
        ::operator new(static_cast<size_t>(experts.layout.record_bytes), std::align_val_t{64}));
    experts.records.emplace_back(record,
                                 [](std::byte* p) { ::operator delete(p, std::align_val_t{64}); });
    experts.pointers.push_back(record);
    for (const ExpertMatrix& m : {experts.layout.gate, experts.layout.up, experts.layout.down}) {
      const std::vector<float> w = random.floats(int64_t{m.rows} * m.cols);
      pack_any(pool, w, m.rows, m.cols, kind, record + m.offset);
    }
  }
  return experts;
}

}  // namespace headrace::test
