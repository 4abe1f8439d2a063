// The part of File that is the same on every platform: completing reads, the injected faults, and
// the drives that a slower one stands for.
#include "io/file.h"

#include <cerrno>
#include <chrono>
#include <system_error>
#include <thread>

#include "io/fault.h"
#include "io/throttle.h"

namespace headrace::io {

std::string error_text(int error) {
  return std::generic_category().message(error) + " (errno " + std::to_string(error) + ")";
}

ReadResult File::read(std::byte* dest, int64_t length, int64_t offset) {
  if (!throttle::is_armed()) [[likely]]
    return read_whole(dest, length, offset);
  const auto over = throttle::take(path_, length);
  const ReadResult result = read_whole(dest, length, offset);
  if (over) std::this_thread::sleep_until(*over);
  return result;
}

ReadResult File::read_whole(std::byte* dest, int64_t length, int64_t offset) {
  int64_t have = 0;
  while (have < length) {
    // A direct read must go on from an aligned place, so the bytes after the last one come again.
    const int64_t from = is_direct() ? align_down(have) : have;
    const ReadResult part = read_some(dest + from, length - from, offset + from);
    if (part.error != 0) return {have, part.error};
    if (from + part.bytes <= have) break;  // nothing new: the file ends here
    have = from + part.bytes;
  }
  if (!is_direct()) drop_pages(length, offset);
  return {have, 0};
}

ReadResult File::read_some(std::byte* dest, int64_t length, int64_t offset) {
  if (fault::is_armed()) [[unlikely]] {
    if (fault::take(fault::Kind::Delay, path_, offset, length)) {
      std::this_thread::sleep_for(fault::kDelay);
    }
    if (fault::take(fault::Kind::Eio, path_, offset, length)) return {0, EIO};
    if (fault::take(fault::Kind::End, path_, offset, length)) return {0, 0};
    if (fault::take(fault::Kind::Short, path_, offset, length) && length > 512) {
      return read_system(dest, is_direct() ? align_up(length / 2) : length / 2, offset);
    }
    if (is_direct() && fault::take(fault::Kind::Einval, path_, offset, length)) become_buffered();
    if (fault::take(fault::Kind::Flip, path_, offset, length)) {
      const ReadResult result = read_system(dest, length, offset);
      if (result.bytes > 0) dest[result.bytes / 2] ^= std::byte{0x10};
      return result;
    }
  }
  const ReadResult result = read_system(dest, length, offset);
  if (result.error == EINVAL && is_direct()) {
    become_buffered();
    return read_system(dest, length, offset);
  }
  return result;
}

}  // namespace headrace::io
