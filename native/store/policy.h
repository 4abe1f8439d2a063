// Which record to give up. Pure: routed records in, victims out; no clock, no bytes, no slots. The
// live store and the replayer of recorded traces drive these same classes.
//
//   frequency  routed tokens, decayed with a half-life; equal counts fall back to recency
//   next-use   the expected time of the next use, learned while running: store/next_use.h
//   slru       segmented recency: a record used again while it is held is protected, four fifths of
//              the slots at most, and falls back among the others when protected ones are too many
//   lru        the least recently used
//
// Whatever the policy, decayed counts are kept: they are what a history saves and restores.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "store/victims.h"

namespace headrace::store {

enum class PolicyKind : uint8_t { Frequency, NextUse, Slru, Lru };

// Throws Error(Config) for a name that is none of: frequency, next-use, slru, lru.
PolicyKind parse_policy(const std::string& name);

struct PolicyShape {
  int32_t num_rows;     // layers with experts
  int32_t num_experts;  // of each
  int32_t num_slots;
  double half_life_tokens;
};

// Bytes that a policy holds at most.
int64_t policy_bytes(PolicyKind kind, const PolicyShape& shape);

// What one acquire tells: the experts of T tokens in one layer.
struct Visit {
  int32_t row;
  std::span<const int32_t> ids;         // [T, A]
  std::span<const int32_t> num_tokens;  // [E], routed to each expert
  int32_t step_tokens;                  // T
};

class Policy {
 public:
  static std::unique_ptr<Policy> make(PolicyKind kind, const PolicyShape& shape);
  virtual ~Policy() = default;

  // The router has spoken, whether the records are cached or not. A step runs the layers in
  // ascending order, so a row that does not ascend begins the next step: true then.
  //
  // With a step of T tokens time passes, for counts by one half-life at most. Its tokens count as
  // if they had come one by one, so a long chunk weighs no more than the same use in decoding; and
  // what earlier steps used keeps half its count, so that records of layers still to come in this
  // step are not pushed out by those of layers already done. Measured: docs/experiments.md,
  // 2026-12-02.
  bool visit(const Visit& visit);

  // Candidates for eviction: records that are cached and unpinned.
  void insert(int32_t record);
  void remove(int32_t record) { victims_.remove(record); }
  bool contains(int32_t record) const { return victims_.contains(record); }
  // The least worthy candidate, -1 if there is none. It stays a candidate until evicted or removed.
  int32_t victim() const { return victims_.victim(); }
  // The record leaves the cache.
  void evict(int32_t record);

  bool is_hotter(int32_t left, int32_t right) const { return victims_.precedes(right, left); }
  // Routed tokens per record, decayed to now.
  std::vector<double> frequencies() const;
  void set_frequencies(std::span<const double> frequencies);

  // For tests and debug_check.
  bool is_consistent() const { return victims_.is_consistent(); }

 protected:
  explicit Policy(const PolicyShape& shape);
  static size_t index(int64_t value) { return static_cast<size_t>(value); }

  // Rates the records of the visit's layer; counts are up to date, `tick` orders uses.
  virtual void rate(const Visit& visit) = 0;
  // Counts were set from outside, or scaled: rates what hangs on them.
  virtual void rate_all() = 0;
  virtual void inserted(int32_t) {}
  virtual void evicted(int32_t) {}

  template <typename Use>
  void for_each_routed(const Visit& visit, Use use) const {
    for (int32_t expert = 0; expert < shape_.num_experts; ++expert) {
      if (visit.num_tokens[index(expert)] > 0) use(visit.row * shape_.num_experts + expert);
    }
  }

  const PolicyShape shape_;
  VictimTree victims_;
  std::vector<double> count_;  // inflated to the last rebase's time by 2^(now / half-life)
  std::vector<int64_t> last_use_;
  int64_t num_steps_ = 0;

 private:
  void begin_step(double tokens);
  void rebase();

  double token_weight_ = 1.0;    // of one token of this step
  double now_half_lives_ = 0.0;  // since the last rebase
  int64_t tick_ = 0;
  int32_t last_row_ = -1;
};

}  // namespace headrace::store
