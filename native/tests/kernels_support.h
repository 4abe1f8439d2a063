// What the tests of the kernels and the thread pool share, beside check.h.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "base/error.h"
#include "check.h"

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

}  // namespace headrace::test
