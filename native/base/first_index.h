// The least of the indices that several threads report, whichever saw it.
#pragma once

#include <atomic>
#include <cstdint>

namespace headrace {

class FirstIndex {
 public:
  static constexpr int64_t kNone = INT64_MAX;

  void report(int64_t index) {
    int64_t seen = index_.load();
    while (index < seen && !index_.compare_exchange_weak(seen, index)) {
    }
  }
  int64_t get() const { return index_.load(); }

 private:
  std::atomic<int64_t> index_{kNone};
};

}  // namespace headrace
