// Anonymous memory straight from the system: page aligned, zero, and counted as resident only once
// touched. Direct reads land in it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace headrace::io {

class PageBuffer {
 public:
  PageBuffer() = default;
  // Reserves `bytes`. Throws Error(MemoryBudget) if the system refuses. Huge pages, where the
  // system gives them, spare address-translation misses in what is read end to end: a large buffer
  // starts at a multiple of 2 MiB, so that all but its end can be such pages. It is spread over the
  // memory of all sockets if there are several and it is large.
  explicit PageBuffer(int64_t bytes);
  ~PageBuffer();
  PageBuffer(PageBuffer&& other) noexcept;
  PageBuffer& operator=(PageBuffer&& other) noexcept;

  std::byte* data() const { return data_; }
  int64_t size_bytes() const { return size_bytes_; }

  // Gives the pages of [offset, offset + length) back to the system; they read as zero afterwards.
  void discard(int64_t offset, int64_t length);

  // As lock_pages, for all of it.
  void lock();

 private:
  std::byte* data_ = nullptr;
  int64_t size_bytes_ = 0;
  bool is_locked_ = false;
};

// Pages that hold these bytes are never swapped out, from the moment each is first touched. Ends
// with the mapping. Throws Error(MemoryBudget) naming the limit if the system refuses.
void lock_pages(const std::byte* data, int64_t length);

// Gives the system the pages that the C library keeps of what was freed, where it can be told to.
// It keeps what a thread freed for that thread's next need, tens of MiB after a vocabulary was
// parsed.
void trim_heap();

// Numbers of the NUMA nodes that have memory, as `sysfs` says; empty where it says nothing.
std::vector<int> memory_nodes(const std::string& sysfs = "/sys");

// Spreads pages of [data, data + length) that were not touched yet over nodes in turn: one socket's
// cores then read with the bandwidth of all. False if the system does not do it.
bool interleave(std::byte* data, int64_t length, const std::vector<int>& nodes);

}  // namespace headrace::io
