#ifndef _WIN32

#ifndef _GNU_SOURCE
#define _GNU_SOURCE  // madvise
#endif
#include <sys/mman.h>

#include <cerrno>
#include <string>
#include <utility>

#include "base/error.h"
#include "io/file.h"
#include "io/memory.h"

namespace headrace::io {

PageBuffer::PageBuffer(int64_t bytes, [[maybe_unused]] PageSize page_size)
    : size_bytes_(align_up(bytes)) {
  if (size_bytes_ == 0) return;
  void* memory = ::mmap(nullptr, static_cast<size_t>(size_bytes_), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    throw Error(ErrorKind::MemoryBudget, "the system refused " + std::to_string(size_bytes_) +
                                             " bytes of memory: " + error_text(errno) +
                                             "\nhint: grant less with `--memory`");
  }
#ifdef MADV_HUGEPAGE
  ::madvise(memory, static_cast<size_t>(size_bytes_),  // advice: may fail
            page_size == PageSize::Huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
#endif
  data_ = static_cast<std::byte*>(memory);
}

PageBuffer::~PageBuffer() {
  if (data_ != nullptr) ::munmap(data_, static_cast<size_t>(size_bytes_));
}

PageBuffer::PageBuffer(PageBuffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_bytes_(std::exchange(other.size_bytes_, 0)) {}

PageBuffer& PageBuffer::operator=(PageBuffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_bytes_, other.size_bytes_);
  return *this;
}

void PageBuffer::discard(int64_t offset, int64_t length) {
  ::madvise(data_ + offset, static_cast<size_t>(length), MADV_DONTNEED);
}

}  // namespace headrace::io

#endif  // !_WIN32
