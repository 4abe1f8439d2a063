#include "base/array_pool.h"

#include <bit>
#include <new>

namespace headrace {
namespace {

constexpr std::align_val_t kAlignment{64};

}  // namespace

// Four sizes per power of two: at most a fifth is lost, and near sizes share buffers.
int64_t ArrayPool::rounded(int64_t num_bytes) {
  if (num_bytes <= 256) return 256;
  const int64_t step =
      static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(num_bytes - 1))) / 4;
  return (num_bytes + step - 1) / step * step;
}

ArrayPool::~ArrayPool() { trim(); }

void* ArrayPool::take(int64_t num_bytes) {
  const int64_t size = rounded(num_bytes);
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<void*>& list = free_[size];
    if (!list.empty()) {
      void* buffer = list.back();
      list.pop_back();
      return buffer;
    }
    held_bytes_ += size;
  }
  try {
    return ::operator new(static_cast<std::size_t>(size), kAlignment);
  } catch (...) {
    const std::lock_guard<std::mutex> lock(mutex_);
    held_bytes_ -= size;
    throw;
  }
}

void ArrayPool::give(void* buffer, int64_t num_bytes) {
  const int64_t size = rounded(num_bytes);
  const std::lock_guard<std::mutex> lock(mutex_);
  free_[size].push_back(buffer);
}

int64_t ArrayPool::held_bytes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return held_bytes_;
}

void ArrayPool::trim() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto& [size, list] : free_) {
    for (void* buffer : list) ::operator delete(buffer, kAlignment);
    held_bytes_ -= size * static_cast<int64_t>(list.size());
    list.clear();
  }
}

ArrayPool& ArrayPool::shared() {
  // Never destroyed: arrays may outlive every static object at interpreter exit.
  static ArrayPool* pool = new ArrayPool;
  return *pool;
}

}  // namespace headrace
