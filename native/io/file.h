// One open file, read at explicit offsets, past the operating system's page cache where the
// filesystem allows it. Knows bytes, not models. The platform's calls live in file_<platform>.cpp;
// nothing else in headrace makes them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

#include "base/error.h"

namespace headrace::io {

// Direct reads need addresses, offsets and lengths at multiples of the drive's block: 512 or 4096.
// We use the larger everywhere, so that no drive has to be asked.
inline constexpr int64_t kAlignment = 4096;

constexpr int64_t align_down(int64_t value) { return value / kAlignment * kAlignment; }
constexpr int64_t align_up(int64_t value) { return align_down(value + kAlignment - 1); }
inline bool is_aligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % kAlignment == 0;
}

struct ReadResult {
  int64_t bytes = 0;  // read before the end of the file or the error
  int error = 0;      // 0, or the system's error number
};

// What an error number means, in the system's words.
std::string error_text(int error);

class File {
 public:
  // Opens for reading; asks for direct reads when `direct`. Throws Error(kind) with the path and
  // cause.
  File(std::string path, bool direct, ErrorKind kind);
  ~File();
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  const std::string& path() const { return path_; }
  int64_t size_bytes() const { return size_bytes_; }  // when opened
  bool is_direct() const { return direct_.load(std::memory_order_relaxed); }

  // Reads until `length` bytes are there, the file ends or an error comes: partial reads are
  // continued, interrupted ones repeated. While is_direct(), dest, length and offset must be
  // multiples of kAlignment. A direct read that the filesystem refuses (EINVAL) turns the file to
  // buffered reads for good and is repeated; buffered reads drop their pages afterwards. Safe from
  // many threads.
  ReadResult read(std::byte* dest, int64_t length, int64_t offset);

 private:
  ReadResult read_whole(std::byte* dest, int64_t length, int64_t offset);
  ReadResult read_some(std::byte* dest, int64_t length, int64_t offset);
  ReadResult read_system(std::byte* dest, int64_t length, int64_t offset);  // one system call
  void become_buffered();
  void drop_pages(int64_t length, int64_t offset);

  std::string path_;
  int64_t size_bytes_ = 0;
  std::atomic<bool> direct_{false};
  intptr_t handle_ = -1;
};

}  // namespace headrace::io
