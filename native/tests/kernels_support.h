// What the programs that test the kernels and the thread pool share, beside check.h.
#pragma once

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
inline constexpr Kind kKinds[] = {{Format::F32, 1},   {Format::F16, 1}, {Format::BF16, 1},
                                  {Format::Q8, 32},   {Format::Q4, 32}, {Format::Q4, 64},
                                  {Format::MXFP4, 32}};

// Packed bytes at a multiple of 64, in a buffer of exactly their size.
class Packed {
 public:
  Packed(ThreadPool& pool, const std::vector<float>& w, int32_t rows, int32_t cols, Kind kind)
      : bytes_(packed_bytes(kind.format, rows, cols, kind.group)),
        data_(static_cast<std::byte*>(
            ::operator new(static_cast<size_t>(bytes_), std::align_val_t{64}))) {
    const RowMajor source{reinterpret_cast<const std::byte*>(w.data()), Format::F32, rows, cols};
    pack(pool, source, kind.format, kind.group, "w", data_);
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
      const RowMajor source{reinterpret_cast<const std::byte*>(w.data()), Format::F32, m.rows,
                            m.cols};
      pack(pool, source, m.format, m.group, "w", record + m.offset);
    }
  }
  return experts;
}

}  // namespace headrace::test
