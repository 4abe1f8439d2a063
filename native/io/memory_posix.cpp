#ifndef _WIN32

#ifndef _GNU_SOURCE
#define _GNU_SOURCE  // madvise, mlock2
#endif
#include <sys/mman.h>
#include <sys/resource.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <cerrno>
#include <fstream>
#include <sstream>
#include <string>
#include <utility>

#include "base/error.h"
#include "io/file.h"
#include "io/memory.h"

namespace headrace::io {
namespace {

constexpr int64_t kHugePageBytes = int64_t{2} << 20;
// Smaller buffers may lie on one socket: they are read once per token, and so are few bytes.
constexpr int64_t kLeastInterleavedBytes = int64_t{64} << 20;

// MADV_DONTNEED_LOCKED, since Linux 5.18; other systems refuse the number.
constexpr int kDiscardLocked = 24;

size_t size(int64_t bytes) { return static_cast<size_t>(bytes); }

std::byte* map(int64_t bytes) {
  void* memory =
      ::mmap(nullptr, size(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    throw Error(ErrorKind::MemoryBudget, "the system refused " + std::to_string(bytes) +
                                             " bytes of memory: " + error_text(errno) +
                                             "\nhint: grant less with `--memory`");
  }
  return static_cast<std::byte*>(memory);
}

// Reserves more than needed and gives back what lies before and behind.
std::byte* map_at_huge_page(int64_t bytes) {
  std::byte* memory = map(bytes + kHugePageBytes);
  const int64_t misfit =
      static_cast<int64_t>(reinterpret_cast<uintptr_t>(memory) % size(kHugePageBytes));
  const int64_t before = misfit == 0 ? 0 : kHugePageBytes - misfit;
  if (before > 0) ::munmap(memory, size(before));
  ::munmap(memory + before + bytes, size(kHugePageBytes - before));
  return memory + before;
}

int lock_on_touch(const std::byte* data, size_t length) {
#if defined(__linux__) && defined(MLOCK_ONFAULT)
  return ::mlock2(data, length, MLOCK_ONFAULT);
#else
  return ::mlock(data, length);
#endif
}

std::string lock_limit() {
  struct rlimit limit{};
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY)
    return "no limit";
  return std::to_string(limit.rlim_cur) + " bytes";
}

}  // namespace

PageBuffer::PageBuffer(int64_t bytes) : size_bytes_(align_up(bytes)) {
  if (size_bytes_ == 0) return;
  data_ = size_bytes_ >= kHugePageBytes ? map_at_huge_page(size_bytes_) : map(size_bytes_);
#ifdef MADV_HUGEPAGE
  ::madvise(data_, size(size_bytes_), MADV_HUGEPAGE);  // may fail
#endif
  if (size_bytes_ < kLeastInterleavedBytes) return;
  const std::vector<int> nodes = memory_nodes();
  if (nodes.size() > 1) interleave(data_, size_bytes_, nodes);  // where it fails, it is only slower
}

PageBuffer::~PageBuffer() {
  if (data_ != nullptr) ::munmap(data_, size(size_bytes_));
}

PageBuffer::PageBuffer(PageBuffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_bytes_(std::exchange(other.size_bytes_, 0)),
      is_locked_(std::exchange(other.is_locked_, false)) {}

PageBuffer& PageBuffer::operator=(PageBuffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_bytes_, other.size_bytes_);
  std::swap(is_locked_, other.is_locked_);
  return *this;
}

void PageBuffer::discard(int64_t offset, int64_t length) {
  std::byte* const first = data_ + offset;
  if (is_locked_ && ::madvise(first, size(length), kDiscardLocked) == 0) return;
  // Locked pages cannot be given back. Locking them anew asks for no more than was granted before.
  if (is_locked_) ::munlock(first, size(length));
  ::madvise(first, size(length), MADV_DONTNEED);
  if (is_locked_) lock_on_touch(first, size(length));
}

void PageBuffer::lock() {
  lock_pages(data_, size_bytes_);
  is_locked_ = true;
}

void lock_pages(const std::byte* data, int64_t length) {
  if (length == 0) return;
  // From the page of the first byte on: not every system rounds down by itself.
  const int64_t skip = static_cast<int64_t>(reinterpret_cast<uintptr_t>(data) % size(kAlignment));
  if (lock_on_touch(data - skip, size(length + skip)) == 0) return;
  const int error = errno;
  throw Error(ErrorKind::MemoryBudget,
              "the system refused to lock " + std::to_string(length) + " bytes in memory: " +
                  error_text(error) + "\nRLIMIT_MEMLOCK allows this process " + lock_limit() +
                  " in all\nhint: raise it (`ulimit -l unlimited`, or " +
                  "`LimitMEMLOCK=infinity` of a service), or run without `--lock-memory`");
}

void trim_heap() {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

// The kernel writes lists such as `0-1,4`.
std::vector<int> memory_nodes(const std::string& sysfs) {
  std::ifstream file(sysfs + "/devices/system/node/has_memory");
  std::string text, part;
  std::getline(file, text);
  std::vector<int> nodes;
  for (std::istringstream parts(text); std::getline(parts, part, ',');) {
    std::istringstream numbers(part);
    int first = 0, last = 0;
    char dash = 0;
    if (!(numbers >> first)) continue;
    if (!(numbers >> dash >> last)) last = first;
    for (int node = first; node <= last; ++node) nodes.push_back(node);
  }
  return nodes;
}

bool interleave([[maybe_unused]] std::byte* data, [[maybe_unused]] int64_t length,
                [[maybe_unused]] const std::vector<int>& nodes) {
#if defined(__linux__) && defined(SYS_mbind)
  constexpr int kInterleave = 3;  // MPOL_INTERLEAVE: the call has no face in the C library
  constexpr int kMaskBits = 8 * sizeof(unsigned long);
  std::vector<unsigned long> mask;
  for (const int node : nodes) {
    const size_t word = static_cast<size_t>(node / kMaskBits);
    if (mask.size() <= word) mask.resize(word + 1, 0);
    mask[word] |= 1UL << (node % kMaskBits);
  }
  // The kernel takes one bit less than it is told.
  const unsigned long num_bits = mask.size() * kMaskBits + 1;
  return ::syscall(SYS_mbind, data, size(length), kInterleave, mask.data(), num_bits, 0) == 0;
#else
  return false;
#endif
}

}  // namespace headrace::io

#endif  // !_WIN32
