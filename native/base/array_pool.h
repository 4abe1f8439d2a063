// Free lists of 64-aligned buffers for the results of ops: after the first steps an op finds a
// buffer whose pages were touched before, instead of asking the system for zeroed ones each time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace headrace {

class ArrayPool {
 public:
  ~ArrayPool();

  void* take(int64_t num_bytes);
  void give(void* buffer);

  int64_t held_bytes() const;  // in use and free
  void trim();                 // returns the free buffers to the system

  static ArrayPool& shared();

 private:
  static int64_t rounded(int64_t num_bytes);

  mutable std::mutex mutex_;
  std::map<int64_t, std::vector<void*>> free_;  // by the buffers' own size
  int64_t held_bytes_ = 0;
};

// A buffer of the shared pool, given back at the end of its scope.
template <class T>
class PoolBuffer {
 public:
  explicit PoolBuffer(int64_t count)
      : count_(count), data_(static_cast<T*>(ArrayPool::shared().take(bytes()))) {}
  ~PoolBuffer() {
    if (data_ != nullptr) ArrayPool::shared().give(data_);
  }
  PoolBuffer(PoolBuffer&& other) noexcept : count_(other.count_), data_(other.data_) {
    other.data_ = nullptr;
  }
  PoolBuffer(const PoolBuffer&) = delete;
  PoolBuffer& operator=(const PoolBuffer&) = delete;
  PoolBuffer& operator=(PoolBuffer&&) = delete;

  T* get() const { return data_; }
  T& operator[](int64_t i) const { return data_[i]; }
  int64_t count() const { return count_; }
  int64_t bytes() const { return count_ * static_cast<int64_t>(sizeof(T)); }

 private:
  int64_t count_;
  T* data_;
};

}  // namespace headrace
