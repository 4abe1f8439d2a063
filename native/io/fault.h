// Faults that tests cause on purpose in the readers: an I/O error, a short read, a flipped bit. The
// only state of the native core that belongs to the process and not to an object, since it stands
// for the hardware. Costs one relaxed load per read while no fault is armed.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

namespace headrace::fault {

enum class Kind {
  Eio,        // the read fails with EIO
  Short,      // the system returns about half of what was asked for: must be continued
  End,        // the file seems to end at the read's offset: a truncated file
  Delay,      // the read takes kDelay longer
  Flip,       // one bit in the middle of the bytes read is inverted
  Einval,     // the filesystem refuses a direct read
  StaleSlot,  // the store hands out a slot's previous bytes without reading: the bug that the truth
              // test must notice
};

inline constexpr std::chrono::milliseconds kDelay{20};

struct Fault {
  Kind kind;
  int64_t after;              // matching reads that pass unharmed first
  int64_t count;              // reads that fail then; negative: all
  std::string path_contains;  // only files whose path holds this text
  int64_t offset;             // only reads that cover this byte; negative: any
};

void inject(Fault fault);
void clear();
int64_t num_fired();  // since the last clear

// "eio", "short", "end", "delay", "flip", "einval", "stale_slot". Throws Error(Config) for others.
Kind parse_kind(std::string_view name);

inline std::atomic<bool> armed{false};
inline bool is_armed() { return armed.load(std::memory_order_relaxed); }

// True if a fault of this kind strikes the read of [offset, offset + length) of the file.
bool take(Kind kind, std::string_view path, int64_t offset, int64_t length);

}  // namespace headrace::fault
