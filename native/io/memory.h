// Anonymous memory straight from the system: page aligned, zero, and counted as resident only once
// touched. Direct reads land in it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace headrace::io {

// Huge pages spare address-translation misses in weights read end to end. Memory that fills slowly,
// as a pool of KV pages does, wants small ones, or its first byte costs 2 MiB.
enum class PageSize { Small, Huge };

class PageBuffer {
 public:
  PageBuffer() = default;
  // Reserves `bytes`. Throws Error(MemoryBudget) if the system refuses.
  explicit PageBuffer(int64_t bytes, PageSize page_size = PageSize::Huge);
  ~PageBuffer();
  PageBuffer(PageBuffer&& other) noexcept;
  PageBuffer& operator=(PageBuffer&& other) noexcept;

  std::byte* data() const { return data_; }
  int64_t size_bytes() const { return size_bytes_; }

  // Gives the pages of [offset, offset + length) back to the system; they read as zero afterwards.
  void discard(int64_t offset, int64_t length);

 private:
  std::byte* data_ = nullptr;
  int64_t size_bytes_ = 0;
};

}  // namespace headrace::io
