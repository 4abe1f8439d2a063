// Slower drives than the machine's, for tests and benches: reads of a file take as long as a drive
// of a stated bandwidth and latency would. State of the process and not of an object, as in
// fault.h, since it stands for the hardware. Costs one relaxed load per read while nothing is
// slowed.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace headrace::throttle {

struct Drive {
  std::string path_prefix;  // files whose path begins so lie on this drive
  double bytes_per_s;       // of all its reads together: one bucket, however many threads read
  double latency_s;         // added to each read; reads in flight wait it out side by side
};

// A second drive of the same prefix replaces the first; of several that fit, the longest prefix
// counts. Throws Error(Config) for a bandwidth that is not above zero, or a latency below.
void set(Drive drive);
void clear();

inline std::atomic<bool> armed{false};
inline bool is_armed() { return armed.load(std::memory_order_relaxed); }

// When a read of `length` bytes that begins now would be over: after all that were taken before.
// None for a file on no slowed drive. The caller reads and then waits until then, so the drive
// below must be the faster one.
std::optional<std::chrono::steady_clock::time_point> take(std::string_view path, int64_t length);

}  // namespace headrace::throttle
