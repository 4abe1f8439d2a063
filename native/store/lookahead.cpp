#include "store/lookahead.h"

#include <algorithm>

namespace headrace::store {
namespace {

constexpr double kKeep = 0.98;         // of what was learned of places, per layer judged
constexpr double kKeepPace = 0.98;     // of what was seen of the drive, per layer
constexpr double kLeastSlope = 0.25;   // of the time for a record that has the drive to itself
constexpr double kKeepWindow = 0.9;    // of a window: it follows the length of the context
constexpr double kKeepMost = 0.9;      // of the records read early in a step of many tokens
constexpr double kLeastChance = 0.35;  // below, a record costs another its slot for too little
constexpr int64_t kVainVisits = 128;   // layers in which nothing pays, before a rest
constexpr int64_t kRestVisits = 1024;  // layers without naming

}  // namespace

void ReadPace::add(double num_records, double busy_ns) {
  for (double* sum : {&count_, &records_, &busy_ns_, &squares_, &products_}) *sum *= kKeepPace;
  count_ += 1.0;
  records_ += num_records;
  busy_ns_ += busy_ns;
  squares_ += num_records * num_records;
  products_ += num_records * busy_ns;
}

double ReadPace::record_ns() const {
  const double spread = squares_ * count_ - records_ * records_;
  const double slope =
      spread > 0.0 ? (products_ * count_ - records_ * busy_ns_) / spread : mean_ns();
  return std::clamp(slope, kLeastSlope * mean_ns(), mean_ns());
}

double ReadPace::spare_ns() const {
  return count_ > 0.0 ? (busy_ns_ - record_ns() * records_) / count_ : 0.0;
}

void Lookahead::Window::add(double ns) {
  mean_ns = is_known ? kKeepWindow * mean_ns + (1.0 - kKeepWindow) * ns : ns;
  is_known = true;
}

Lookahead::Lookahead(int32_t num_experts)
    : num_experts_(num_experts),
      is_named_(index(num_experts), 0),
      was_missing_(index(num_experts), 0),
      best_place_(index(num_experts), kPlaces),
      doubt_(index(num_experts), 1.0) {
  candidates_.reserve(index(num_experts));
}

std::span<const int32_t> Lookahead::name(int32_t row, std::span<const int32_t> ids,
                                         int32_t num_tokens, std::span<const int32_t> is_missing,
                                         const DriveView& drive) {
  std::fill(is_named_.begin(), is_named_.end(), uint8_t{0});
  std::fill(best_place_.begin(), best_place_.end(), kPlaces);
  std::fill(doubt_.begin(), doubt_.end(), 1.0);
  std::copy(is_missing.begin(), is_missing.end(), was_missing_.begin());
  candidates_.clear();
  named_row_ = row;
  named_tokens_ = num_tokens;
  const size_t num_chosen = ids.size() / index(std::max(num_tokens, 1));
  for (size_t i = 0; i < ids.size(); ++i) {
    const size_t expert = index(ids[i]);
    const int32_t place = std::min(static_cast<int32_t>(i % num_chosen), kPlaces - 1);
    if (is_named_[expert] == 0 && is_missing[expert] != 0) candidates_.push_back(ids[i]);
    is_named_[expert] = 1;
    best_place_[expert] = std::min(best_place_[expert], place);
    doubt_[expert] *= 1.0 - places_[index(place)].chance();
  }
  std::sort(candidates_.begin(), candidates_.end(), [this](int32_t a, int32_t b) {
    if (doubt_[index(a)] != doubt_[index(b)]) return doubt_[index(a)] < doubt_[index(b)];
    if (best_place_[index(a)] != best_place_[index(b)])
      return best_place_[index(a)] < best_place_[index(b)];
    return a < b;
  });
  const bool has_candidates = !candidates_.empty();
  keep_what_pays(drive);
  if (has_candidates) vain_visits_ = candidates_.empty() ? vain_visits_ + 1 : 0;
  if (vain_visits_ >= kVainVisits) {
    vain_visits_ = 0;
    rest_visits_ = kRestVisits;
  }
  return candidates_;
}

void Lookahead::keep_what_pays(const DriveView& drive) {
  record_ns_ = drive.record_ns;
  is_wanted_ = drive.is_wanted;
  const Window& window = windows_[index(is_wanted_)];
  if (named_tokens_ >= kManyTokens) {
    const size_t most = static_cast<size_t>(std::max(most_of_many_ - drive.num_queued, 0.0));
    candidates_.resize(std::min(candidates_.size(), most));
    return;
  }
  double left_ns = window.mean_ns + drive.spare_ns - drive.num_queued * record_ns_;
  const auto pays = [&](int32_t expert) {
    const double chance = 1.0 - doubt_[index(expert)];
    if (chance < kLeastChance) return false;
    if (window.is_known && chance * record_ns_ < record_ns_ - left_ns) return false;
    left_ns -= record_ns_;
    return true;
  };
  candidates_.erase(std::find_if_not(candidates_.begin(), candidates_.end(), pays),
                    candidates_.end());
}

void Lookahead::judge(int32_t row, std::span<const int32_t> num_tokens, const Turn& turn) {
  if (rest_visits_ > 0) --rest_visits_;
  stats_.used += turn.num_used;
  if (row != named_row_) return;
  named_row_ = -1;
  stats_.saved_ns += static_cast<int64_t>(std::min(turn.unawaited_ns, turn.num_used * record_ns_));
  if (named_tokens_ < kManyTokens) {
    windows_[index(is_wanted_)].add(turn.unawaited_ns);
  } else if (record_ns_ > 0.0) {
    most_of_many_ = std::min(kKeepMost * most_of_many_ + turn.idle_ns / record_ns_,
                             static_cast<double>(num_experts_));
  }
  learn(num_tokens);
}

// Of experts that were in memory nothing is learned: those that are not are asked for less often.
void Lookahead::learn(std::span<const int32_t> num_tokens) {
  for (Place& place : places_) {
    place.named *= kKeep;
    place.right *= kKeep;
  }
  for (int32_t expert = 0; expert < num_experts_; ++expert) {
    const bool is_named = is_named_[index(expert)] != 0;
    const bool is_wanted = num_tokens[index(expert)] > 0;
    stats_.named += is_named ? 1 : 0;
    stats_.wanted += is_wanted ? 1 : 0;
    stats_.right += is_named && is_wanted ? 1 : 0;
    if (!is_named || was_missing_[index(expert)] == 0 || named_tokens_ != 1) continue;
    Place& place = places_[index(best_place_[index(expert)])];
    place.named += 1.0;
    place.right += is_wanted ? 1.0 : 0.0;
  }
}

}  // namespace headrace::store
