#include "store/policy.h"

#include <algorithm>
#include <cmath>

namespace headrace::store {
namespace {

// Scores are brought back to the present before 2^now leaves the range of a double.
constexpr double kMaxHalfLives = 512.0;

}  // namespace

Policy::Policy(int32_t num_records, double half_life_tokens)
    : half_life_tokens_(half_life_tokens),
      score_(index(num_records), 0.0),
      last_use_(index(num_records), 0),
      position_(index(num_records), -1) {}

void Policy::begin_step(double tokens) {
  now_half_lives_ += std::min(tokens / half_life_tokens_, 1.0);
  if (now_half_lives_ > kMaxHalfLives) rebase();
  // The mean of 2^(-age / half-life) over the step's tokens.
  const double ratio = std::exp2(-1.0 / half_life_tokens_);
  token_weight_ = tokens > 1 ? (1.0 - std::pow(ratio, tokens)) / ((1.0 - ratio) * tokens) : 1.0;
}

void Policy::rebase() {
  const double factor = std::exp2(-now_half_lives_);
  for (double& score : score_) score *= factor;
  now_half_lives_ = 0.0;
  // What underflowed to zero is equal now and ordered by use, so the heap may have to change.
  for (int32_t at = static_cast<int32_t>(heap_.size()) / 2; at-- > 0;) sift_down(at);
}

void Policy::route(int32_t record, double tokens) {
  score_[index(record)] += tokens * token_weight_ * std::exp2(now_half_lives_);
  last_use_[index(record)] = ++tick_;
  if (contains(record)) sift_down(position_[index(record)]);
}

void Policy::insert(int32_t record) {
  heap_.push_back(record);
  place(record, static_cast<int32_t>(heap_.size()) - 1);
  sift_up(position_[index(record)]);
}

void Policy::remove(int32_t record) {
  const int32_t at = position_[index(record)];
  const int32_t last = heap_.back();
  heap_.pop_back();
  position_[index(record)] = -1;
  if (last == record) return;
  place(last, at);
  sift_up(at);
  sift_down(position_[index(last)]);
}

std::vector<double> Policy::frequencies() const {
  std::vector<double> result(score_);
  const double factor = std::exp2(-now_half_lives_);
  for (double& value : result) value *= factor;
  return result;
}

void Policy::set_frequencies(std::span<const double> frequencies) {
  score_.assign(frequencies.begin(), frequencies.end());
  now_half_lives_ = 0.0;
  for (int32_t at = static_cast<int32_t>(heap_.size()) / 2; at-- > 0;) sift_down(at);
}

bool Policy::precedes(int32_t left, int32_t right) const {
  if (score_[index(left)] != score_[index(right)])
    return score_[index(left)] < score_[index(right)];
  if (last_use_[index(left)] != last_use_[index(right)]) {
    return last_use_[index(left)] < last_use_[index(right)];
  }
  return left < right;  // never used: any order, as long as it is one
}

void Policy::place(int32_t record, int32_t at) {
  heap_[index(at)] = record;
  position_[index(record)] = at;
}

void Policy::sift_up(int32_t at) {
  const int32_t record = heap_[index(at)];
  while (at > 0) {
    const int32_t parent = (at - 1) / 2;
    if (!precedes(record, heap_[index(parent)])) break;
    place(heap_[index(parent)], at);
    at = parent;
  }
  place(record, at);
}

void Policy::sift_down(int32_t at) {
  const int32_t record = heap_[index(at)];
  const int32_t size = static_cast<int32_t>(heap_.size());
  for (int32_t child = 2 * at + 1; child < size; child = 2 * at + 1) {
    if (child + 1 < size && precedes(heap_[index(child + 1)], heap_[index(child)])) ++child;
    if (!precedes(heap_[index(child)], record)) break;
    place(heap_[index(child)], at);
    at = child;
  }
  place(record, at);
}

bool Policy::is_consistent() const {
  size_t num_placed = 0;
  for (const int32_t at : position_) num_placed += at >= 0 ? 1 : 0;
  if (num_placed != heap_.size()) return false;
  for (size_t at = 0; at < heap_.size(); ++at) {
    if (position_[index(heap_[at])] != static_cast<int32_t>(at)) return false;
    if (at > 0 && precedes(heap_[at], heap_[(at - 1) / 2])) return false;
  }
  return true;
}

}  // namespace headrace::store
