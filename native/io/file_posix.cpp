// File on Linux, macOS and other POSIX systems. A Windows build adds file_windows.cpp with the same
// five functions (CreateFile with FILE_FLAG_NO_BUFFERING, ReadFile with an OVERLAPPED offset).
#ifndef _WIN32

#ifndef _GNU_SOURCE
#define _GNU_SOURCE  // O_DIRECT
#endif
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "io/file.h"

namespace headrace::io {
namespace {

// One system call moves at most this much: Linux stops at 2 GiB less a page, macOS refuses beyond 2
// GiB.
constexpr int64_t kMaxCallBytes = int64_t{1} << 30;

int open_read_only(const char* path, int flags) {
  int descriptor;
  do {
    descriptor = ::open(path, O_RDONLY | O_CLOEXEC | flags);
  } while (descriptor < 0 && errno == EINTR);
  return descriptor;
}

}  // namespace

File::File(std::string path, bool direct, ErrorKind kind) : path_(std::move(path)) {
  int descriptor = -1;
#ifdef O_DIRECT
  if (direct) {
    descriptor = open_read_only(path_.c_str(), O_DIRECT);
    direct_ =
        descriptor >= 0;  // a filesystem without direct reads says EINVAL; open it plainly below
  }
#endif
  if (descriptor < 0) descriptor = open_read_only(path_.c_str(), 0);
  if (descriptor < 0) {
    throw Error(kind, "cannot open " + path_ + ": " + error_text(errno) +
                          "\nhint: check that the file exists and may be read");
  }
#if defined(__APPLE__)
  if (direct) ::fcntl(descriptor, F_NOCACHE, 1);  // no alignment needed, so reads count as buffered
#endif
  struct stat status{};
  if (::fstat(descriptor, &status) != 0 || !S_ISREG(status.st_mode)) {
    const int error = errno;
    const bool is_regular = S_ISREG(status.st_mode);
    ::close(descriptor);
    throw Error(kind, "cannot read " + path_ + ": " +
                          (is_regular ? error_text(error) : std::string("not a regular file")));
  }
  size_bytes_ = status.st_size;
  handle_ = descriptor;
}

File::~File() { ::close(static_cast<int>(handle_)); }

ReadResult File::read_system(std::byte* dest, int64_t length, int64_t offset) {
  ssize_t bytes;
  do {
    bytes = ::pread(static_cast<int>(handle_), dest,
                    static_cast<size_t>(std::min(length, kMaxCallBytes)), offset);
  } while (bytes < 0 && errno == EINTR);
  if (bytes < 0) return {0, errno};
  return {bytes, 0};
}

void File::become_buffered() {
#ifdef O_DIRECT
  const int flags = ::fcntl(static_cast<int>(handle_), F_GETFL);
  if (flags >= 0) ::fcntl(static_cast<int>(handle_), F_SETFL, flags & ~O_DIRECT);
#endif
  direct_.store(false, std::memory_order_relaxed);
}

void File::drop_pages(int64_t length, int64_t offset) {
#ifdef POSIX_FADV_DONTNEED
  ::posix_fadvise(static_cast<int>(handle_), offset, length,
                  POSIX_FADV_DONTNEED);  // advice: may fail
#else
  (void)length;
  (void)offset;
#endif
}

}  // namespace headrace::io

#endif  // !_WIN32
