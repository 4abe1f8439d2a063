// Which record to give up. Pure: routed records in, victims out; no clock, no bytes, no slots. The
// replayer of recorded traces drives this same class.
//
// A record's score is its routed tokens, decayed with a half-life counted in tokens. Equal scores
// fall back to the least recently used. Instead of decaying every score at every token, new counts
// are inflated by 2^(now / half-life): the order is the same and only a routed record's key ever
// changes, so every operation is at most logarithmic in the number of candidates.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace headrace::store {

class Policy {
 public:
  Policy(int32_t num_records, double half_life_tokens);

  // A step of `tokens` tokens begins: time passes, by one half-life at most. The step's tokens
  // count as if they had come one by one, so a long chunk weighs no more than the same use in
  // decoding; and what earlier steps used keeps half its score, so that records of layers still to
  // come in this step are not pushed out by those of layers already done. Measured:
  // docs/experiments.md, 2026-12-02.
  void begin_step(double tokens);
  // The router sent `tokens` tokens of this step to the record, whether it is cached or not.
  void route(int32_t record, double tokens);

  // Candidates for eviction: records that are cached and unpinned.
  void insert(int32_t record);
  void remove(int32_t record);
  bool contains(int32_t record) const { return position_[index(record)] >= 0; }
  // The least worthy candidate, -1 if there is none. It stays a candidate until removed.
  int32_t victim() const { return heap_.empty() ? -1 : heap_.front(); }

  bool is_hotter(int32_t left, int32_t right) const { return precedes(right, left); }
  // Routed tokens per record, decayed to now.
  std::vector<double> frequencies() const;
  void set_frequencies(std::span<const double> frequencies);

  // True if the heap and its index agree: for tests and debug_check.
  bool is_consistent() const;

 private:
  static size_t index(int32_t value) { return static_cast<size_t>(value); }
  bool precedes(int32_t left, int32_t right) const;
  void place(int32_t record, int32_t at);
  void sift_up(int32_t at);
  void sift_down(int32_t at);
  void rebase();

  double half_life_tokens_;
  double token_weight_ = 1.0;    // of one token of this step
  double now_half_lives_ = 0.0;  // since the last rebase
  int64_t tick_ = 0;             // orders uses
  std::vector<double> score_;    // inflated to the last rebase's time
  std::vector<int64_t> last_use_;
  std::vector<int32_t> heap_;      // records, least worthy first
  std::vector<int32_t> position_;  // of a record in heap_, -1 outside
};

}  // namespace headrace::store
