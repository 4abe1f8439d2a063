// A recorded trace against a cache of any size: the live store's policy code and its rules of
// admission, without bytes, threads and time. Reads are taken to finish in the order they began.
#pragma once

#include <cstdint>

#include "store/policy.h"
#include "store/trace.h"

namespace headrace::store {

struct ReplayCounts {
  int64_t steps = 0;
  int64_t tokens = 0;
  int64_t requests = 0;  // distinct experts of a visit
  int64_t misses = 0;
};

// Steps in which every row decodes, and all others.
struct ReplayResult {
  ReplayCounts prefill;
  ReplayCounts decode;
};

struct ReplayOptions {
  int32_t num_slots;
  int32_t num_readers;
  int32_t read_ahead;
  double half_life_tokens;
};

// Throws Error(Config) for fewer than 2 slots.
ReplayResult replay(const Trace& trace, PolicyKind policy, const ReplayOptions& options);

// The fewest misses possible with `num_slots` slots by knowing the future: whatever a visit asks
// for may be kept or dropped at once. Source: Belady, "A study of replacement algorithms for a
// virtual-storage computer" (1966).
ReplayResult replay_belady(const Trace& trace, int32_t num_slots);

}  // namespace headrace::store
