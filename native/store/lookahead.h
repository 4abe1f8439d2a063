// What a later layer will probably ask for, and whether reading it early pays. Pure: ids in,
// records out, counts kept; no bytes, no slots, no clock.
//
// A layer's router, applied to the hidden state of the layer before, names experts. What it named
// is compared with what the layer then asks for: by place in the row (its first choice is right
// more often than its eighth), and by the drive's time: what it read before it was needed against
// what unused records kept from it.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

namespace headrace::store {

struct LookaheadStats {
  int64_t named = 0;    // distinct experts named for layers that were then asked for
  int64_t wanted = 0;   // distinct experts that those layers asked for
  int64_t right = 0;    // in both: right / named is the precision, right / wanted the recall
  int64_t used = 0;     // records read on its advice and used
  int64_t unused = 0;   // and given up without use
  int64_t used_ns = 0;  // the drive's time for the used ones: they saved no more waiting than that
};

class Lookahead {
 public:
  explicit Lookahead(int32_t num_experts);

  // False while it rests because it did not pay.
  bool is_on() const { return rest_visits_ == 0; }

  // ids [T, A]: the experts that each of T tokens will probably go to in the layer of a row, the
  // likeliest first. Returns those worth reading, the likeliest first; valid until the next call.
  std::span<const int32_t> name(int32_t row, std::span<const int32_t> ids, int32_t num_tokens);

  // The layer has spoken: tokens routed to each of its experts.
  void judge(int32_t row, std::span<const int32_t> num_tokens);

  // A record read on this advice was used, which took the drive so long before it was asked for; or
  // was given up, and the drive was wanted meanwhile.
  void used(int64_t read_ns);
  void unused(int64_t lost_ns);

  const LookaheadStats& stats() const { return stats_; }

 private:
  static constexpr int32_t kPlaces = 16;  // in a row of ids, further ones count as the last

  struct Place {
    double named = 0.0;  // decayed
    double right = 0.0;
    bool is_likely() const { return right + 1.0 >= kLikely * (named + 1.0); }
  };
  static constexpr double kLikely = 0.5;

  size_t index(int64_t value) const { return static_cast<size_t>(value); }
  void weigh();

  int32_t num_experts_;
  std::vector<int32_t> rows_naming_;  // [E] of the row named last
  std::vector<int32_t> best_place_;   // [E], kPlaces: not named
  std::vector<int32_t> candidates_;
  int32_t named_row_ = -1;
  int32_t named_tokens_ = 0;
  std::array<Place, kPlaces> places_;
  double worth_ns_ = 0.0;  // decayed: read early minus lost
  int64_t visits_ = 0;     // judged since it was switched on
  int64_t rest_visits_ = 0;
  LookaheadStats stats_;
};

}  // namespace headrace::store
