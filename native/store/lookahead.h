// What a later layer will probably ask for, and whether reading it early pays. Pure: ids and times
// in, records out, counts kept; no bytes, no slots, no clock.
//
// A layer's router, applied to the hidden state of the layer before, names experts. What it named
// is compared with what the layer then asks for, by place in the row: its first choice is right
// more often than its eighth. Between the last read that a layer waits for and the first that the
// next one asks for the drive would be idle; the layers before show for how long. A record read
// early fills that window. If it is right, what fits into the window is saved; if it is wrong, what
// does not fit delays the next layer. So with the chance p, a window w and the drive's time s for a
// record it pays if p w > (1 - p) (s - w), that is, if p s > s - w; and each record taken leaves
// the next one a window shorter by s.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

namespace headrace::store {

struct LookaheadStats {
  int64_t named = 0;     // distinct experts named for layers that were then asked for
  int64_t wanted = 0;    // distinct experts that those layers asked for
  int64_t right = 0;     // in both: right / named is the precision, right / wanted the recall
  int64_t used = 0;      // records read on its advice and used
  int64_t unused = 0;    // and given up without use
  int64_t saved_ns = 0;  // windows filled with records that were then used
};

// How long a drive reads, by how much it is asked for: a line through what was seen lately. Reads
// that overlap take less than each alone, so one more record costs the slope of the line, and a
// layer that waits for few leaves a part of the drive unused, at most what the line begins with.
class ReadPace {
 public:
  void add(double num_records, double busy_ns);
  double record_ns() const;  // for one more; 0: not known yet
  double spare_ns() const;   // of a layer's reads, for others beside them

 private:
  double mean_ns() const { return records_ > 0.0 ? busy_ns_ / records_ : 0.0; }

  double count_ = 0.0;  // all decayed
  double records_ = 0.0;
  double busy_ns_ = 0.0;
  double squares_ = 0.0;   // of records
  double products_ = 0.0;  // of records and busy time
};

// The drive at the moment of naming.
struct DriveView {
  double record_ns;    // its time for one more record; 0: not known yet
  double spare_ns;     // beside what is read for this layer
  int32_t num_queued;  // records on their way that nobody waits for
  bool is_wanted;      // somebody waits for another
};

// What came of naming, when the layer has spoken.
struct Turn {
  int32_t num_used;     // records that were read on the advice
  double unawaited_ns;  // up to now nobody waited for the drive
  double idle_ns;       // since the naming, without a read in flight
};

class Lookahead {
 public:
  static constexpr int32_t kManyTokens = 32;

  explicit Lookahead(int32_t num_experts);

  // False while it rests because nothing it named was worth reading.
  bool is_on() const { return rest_visits_ == 0; }

  // ids [T, A]: the experts that each of T tokens will probably go to in the layer of a row, the
  // likeliest first; is_missing [E]: 1 if the expert is not in memory. Returns the missing ones
  // worth reading, the likeliest first; valid until the next call.
  //
  // A step of kManyTokens wants nearly all of a layer, in no order that could be foreseen: as many
  // of its records are read early as kept the drive from being idle in the layers before.
  std::span<const int32_t> name(int32_t row, std::span<const int32_t> ids, int32_t num_tokens,
                                std::span<const int32_t> is_missing, const DriveView& drive);

  // The layer has spoken: tokens routed to each of its experts.
  void judge(int32_t row, std::span<const int32_t> num_tokens, const Turn& turn);

  // A record read on this advice was given up.
  void unused() { ++stats_.unused; }

  const LookaheadStats& stats() const { return stats_; }

 private:
  static constexpr int32_t kPlaces = 16;  // in a row of ids, further ones count as the last

  struct Place {
    double named = 0.0;  // decayed, of experts that were missing
    double right = 0.0;
    double chance() const { return (right + 1.0) / (named + 2.0); }
  };
  // How long the drive was not waited for, after a layer that waited and after one that did not.
  struct Window {
    double mean_ns = 0.0;  // decayed
    bool is_known = false;
    void add(double ns);
  };

  static size_t index(int64_t value) { return static_cast<size_t>(value); }
  void keep_what_pays(const DriveView& drive);
  void learn(std::span<const int32_t> num_tokens);

  int32_t num_experts_;
  std::vector<uint8_t> is_named_;     // [E] of the row named last
  std::vector<int32_t> was_missing_;  // [E]
  std::vector<int32_t> best_place_;   // [E], kPlaces: not named
  std::vector<double> doubt_;         // [E] that no row which named it is right
  std::vector<int32_t> candidates_;
  int32_t named_row_ = -1;
  int32_t named_tokens_ = 0;
  double record_ns_ = 0.0;
  bool is_wanted_ = false;
  std::array<Place, kPlaces> places_;
  std::array<Window, 2> windows_;  // by is_wanted_
  double most_of_many_ = 8.0;      // records read early in a step of many tokens
  int64_t vain_visits_ = 0;        // in a row, in which nothing was worth reading
  int64_t rest_visits_ = 0;
  LookaheadStats stats_;
};

}  // namespace headrace::store
