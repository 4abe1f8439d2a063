#include "base/array_pool.h"

#include <bit>
#include <cstring>
#include <new>

namespace headrace {
namespace {

constexpr std::align_val_t kAlignment{64};
constexpr int64_t kHeaderBytes = 64;  // before each buffer: its size

void* start_of(void* buffer) { return static_cast<std::byte*>(buffer) - kHeaderBytes; }

int64_t size_of(void* buffer) {
  int64_t size = 0;
  std::memcpy(&size, start_of(buffer), sizeof size);
  return size;
}

void* make_buffer(int64_t size) {
  void* start = ::operator new(static_cast<std::size_t>(kHeaderBytes + size), kAlignment);
  std::memcpy(start, &size, sizeof size);
  return static_cast<std::byte*>(start) + kHeaderBytes;
}

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
    for (auto list = free_.lower_bound(size); list != free_.end(); ++list) {
      if (list->first > 2 * size) break;
      if (list->second.empty()) continue;
      void* buffer = list->second.back();
      list->second.pop_back();
      return buffer;
    }
    held_bytes_ += size;
  }
  try {
    return make_buffer(size);
  } catch (...) {
    const std::lock_guard<std::mutex> lock(mutex_);
    held_bytes_ -= size;
    throw;
  }
}

void ArrayPool::give(void* buffer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  free_[size_of(buffer)].push_back(buffer);
}

int64_t ArrayPool::held_bytes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return held_bytes_;
}

void ArrayPool::trim() {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (auto& [size, list] : free_) {
    for (void* buffer : list) ::operator delete(start_of(buffer), kAlignment);
    held_bytes_ -= size * static_cast<int64_t>(list.size());
    list.clear();
  }
}

ArrayPool& ArrayPool::shared() {
  // Never destroyed: arrays may outlive every static object at the interpreter's exit.
  static ArrayPool* pool = new ArrayPool;
  return *pool;
}

}  // namespace headrace
