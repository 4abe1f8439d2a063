#include "store/lookahead.h"

#include <algorithm>

namespace headrace::store {
namespace {

constexpr double kKeep = 0.98;         // of what was learned, per layer judged
constexpr int64_t kTrialVisits = 128;  // layers before its worth is believed
constexpr int64_t kRestVisits = 4096;  // layers without it, then another trial

}  // namespace

Lookahead::Lookahead(int32_t num_experts)
    : num_experts_(num_experts),
      rows_naming_(index(num_experts), 0),
      best_place_(index(num_experts), kPlaces) {
  candidates_.reserve(index(num_experts));
}

std::span<const int32_t> Lookahead::name(int32_t row, std::span<const int32_t> ids,
                                         int32_t num_tokens) {
  std::fill(rows_naming_.begin(), rows_naming_.end(), 0);
  std::fill(best_place_.begin(), best_place_.end(), kPlaces);
  candidates_.clear();
  named_row_ = row;
  named_tokens_ = num_tokens;
  const size_t num_chosen = ids.size() / index(std::max(num_tokens, 1));
  for (size_t i = 0; i < ids.size(); ++i) {
    const size_t expert = index(ids[i]);
    const int32_t place = std::min(static_cast<int32_t>(i % num_chosen), kPlaces - 1);
    if (rows_naming_[expert]++ == 0) candidates_.push_back(ids[i]);
    best_place_[expert] = std::min(best_place_[expert], place);
  }
  std::erase_if(candidates_, [this](int32_t id) {
    const size_t expert = index(id);
    return rows_naming_[expert] == 1 && !places_[index(best_place_[expert])].is_likely();
  });
  std::sort(candidates_.begin(), candidates_.end(), [this](int32_t a, int32_t b) {
    if (rows_naming_[index(a)] != rows_naming_[index(b)]) {
      return rows_naming_[index(a)] > rows_naming_[index(b)];
    }
    if (best_place_[index(a)] != best_place_[index(b)]) {
      return best_place_[index(a)] < best_place_[index(b)];
    }
    return a < b;
  });
  return candidates_;
}

void Lookahead::judge(int32_t row, std::span<const int32_t> num_tokens) {
  if (rest_visits_ > 0) --rest_visits_;
  if (row != named_row_) return;
  named_row_ = -1;
  for (Place& place : places_) {
    place.named *= kKeep;
    place.right *= kKeep;
  }
  for (int32_t expert = 0; expert < num_experts_; ++expert) {
    const bool is_named = rows_naming_[index(expert)] > 0;
    const bool is_wanted = num_tokens[index(expert)] > 0;
    stats_.named += is_named ? 1 : 0;
    stats_.wanted += is_wanted ? 1 : 0;
    stats_.right += is_named && is_wanted ? 1 : 0;
    if (!is_named || named_tokens_ != 1) continue;
    Place& place = places_[index(best_place_[index(expert)])];
    place.named += 1.0;
    place.right += is_wanted ? 1.0 : 0.0;
  }
  weigh();
}

void Lookahead::used(int64_t read_ns) {
  ++stats_.used;
  stats_.used_ns += read_ns;
  worth_ns_ += static_cast<double>(read_ns);
}

void Lookahead::unused(int64_t lost_ns) {
  ++stats_.unused;
  worth_ns_ -= static_cast<double>(lost_ns);
}

// Switches it off when it lost more of the drive's time than it used well.
void Lookahead::weigh() {
  worth_ns_ *= kKeep;
  if (++visits_ < kTrialVisits || worth_ns_ >= 0.0) return;
  visits_ = 0;
  worth_ns_ = 0.0;
  rest_visits_ = kRestVisits;
}

}  // namespace headrace::store
