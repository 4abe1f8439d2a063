#include "store/policy.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/error.h"
#include "store/next_use.h"

namespace headrace::store {
namespace {

// Counts are brought back to the present before 2^now leaves the range of a double.
constexpr double kMaxHalfLives = 512.0;

class FrequencyPolicy final : public Policy {
 public:
  explicit FrequencyPolicy(const PolicyShape& shape) : Policy(shape) {}

 private:
  void rate(const Visit& visit) override {
    for_each_routed(visit, [this](int32_t record) { victims_.set_worth(record, worth(record)); });
  }
  void rate_all() override {
    std::vector<Worth> worths;
    for (size_t record = 0; record < count_.size(); ++record) {
      worths.push_back(worth(static_cast<int32_t>(record)));
    }
    victims_.set_worths(0, worths);
  }
  Worth worth(int32_t record) const { return {count_[index(record)], last_use_[index(record)]}; }
};

// What was never used comes before what was, by its count: a history orders it.
double never_used(double count) { return -1.0 / (1.0 + count); }

class LruPolicy final : public Policy {
 public:
  explicit LruPolicy(const PolicyShape& shape) : Policy(shape) {}

 private:
  void rate(const Visit& visit) override {
    for_each_routed(visit, [this](int32_t record) {
      victims_.set_worth(record, {static_cast<double>(last_use_[index(record)])});
    });
  }
  void rate_all() override {
    for (size_t record = 0; record < count_.size(); ++record) {
      if (last_use_[record] > 0) continue;
      victims_.set_worth(static_cast<int32_t>(record), {never_used(count_[record])});
    }
  }
};

// Both segments in one order: protected records are worth more than any other.
class SlruPolicy final : public Policy {
 public:
  explicit SlruPolicy(const PolicyShape& shape)
      : Policy(shape),
        most_protected_(std::max(1, shape.num_slots * 4 / 5)),
        is_held_(count_.size(), false),
        older_(count_.size(), kOutside),
        newer_(count_.size(), kOutside) {}

 private:
  static constexpr int32_t kNobody = -1;
  static constexpr int32_t kOutside = -2;
  static constexpr double kProtected = 0x1p52;  // above any tick

  void rate(const Visit& visit) override {
    for_each_routed(visit, [this](int32_t record) {
      if (!is_held_[index(record)]) {
        victims_.set_worth(record, {static_cast<double>(last_use_[index(record)])});
        return;
      }
      unlink(record);
      append(record);
      if (num_protected_ > most_protected_) demote(oldest_);
    });
  }
  void rate_all() override {
    for (size_t record = 0; record < count_.size(); ++record) {
      if (last_use_[record] > 0) continue;
      victims_.set_worth(static_cast<int32_t>(record), {never_used(count_[record])});
    }
  }
  void inserted(int32_t record) override { is_held_[index(record)] = true; }
  void evicted(int32_t record) override {
    is_held_[index(record)] = false;
    unlink(record);
  }

  // It goes to the end of the others that is given up last.
  void demote(int32_t record) {
    unlink(record);
    victims_.set_worth(record, {static_cast<double>(last_use_[index(newest_)])});
  }
  void append(int32_t record) {
    victims_.set_worth(record, {kProtected + static_cast<double>(last_use_[index(record)])});
    older_[index(record)] = newest_;
    newer_[index(record)] = kNobody;
    (newest_ == kNobody ? oldest_ : newer_[index(newest_)]) = record;
    newest_ = record;
    ++num_protected_;
  }
  void unlink(int32_t record) {
    if (older_[index(record)] == kOutside) return;
    const int32_t older = std::exchange(older_[index(record)], kOutside);
    const int32_t newer = std::exchange(newer_[index(record)], kOutside);
    (older == kNobody ? oldest_ : newer_[index(older)]) = newer;
    (newer == kNobody ? newest_ : older_[index(newer)]) = older;
    --num_protected_;
  }

  int32_t most_protected_;
  int32_t num_protected_ = 0;
  int32_t oldest_ = kNobody;
  int32_t newest_ = kNobody;
  std::vector<bool> is_held_;
  std::vector<int32_t> older_;  // neighbours among the protected, by use
  std::vector<int32_t> newer_;
};

}  // namespace

PolicyKind parse_policy(const std::string& name) {
  if (name == "frequency") return PolicyKind::Frequency;
  if (name == "next-use") return PolicyKind::NextUse;
  if (name == "slru") return PolicyKind::Slru;
  if (name == "lru") return PolicyKind::Lru;
  throw Error(ErrorKind::Config,
              "unknown policy: `" + name + "`\nexpected frequency, next-use, slru or lru");
}

int64_t policy_bytes(PolicyKind kind, const PolicyShape& shape) {
  // Worth, two nodes of up to twice as many, count, last use; SLRU's list fits beside them.
  const int64_t each = sizeof(Worth) + 4 * sizeof(int32_t) + sizeof(double) + sizeof(int64_t) + 16;
  const int64_t books = each * shape.num_rows * shape.num_experts;
  return books + (kind == PolicyKind::NextUse ? NextUsePolicy::learned_bytes(shape) : 0);
}

std::unique_ptr<Policy> Policy::make(PolicyKind kind, const PolicyShape& shape) {
  switch (kind) {
    case PolicyKind::Frequency:
      return std::make_unique<FrequencyPolicy>(shape);
    case PolicyKind::NextUse:
      return std::make_unique<NextUsePolicy>(shape);
    case PolicyKind::Slru:
      return std::make_unique<SlruPolicy>(shape);
    case PolicyKind::Lru:
      break;
  }
  return std::make_unique<LruPolicy>(shape);
}

Policy::Policy(const PolicyShape& shape)
    : shape_(shape),
      victims_(shape.num_rows * shape.num_experts),
      count_(index(shape.num_rows) * index(shape.num_experts), 0.0),
      last_use_(count_.size(), 0) {}

bool Policy::visit(const Visit& visit) {
  const bool begins_step = visit.row <= last_row_ || last_row_ < 0;
  if (begins_step) begin_step(visit.step_tokens);
  last_row_ = visit.row;
  const double one = token_weight_ * std::exp2(now_half_lives_);
  for_each_routed(visit, [&](int32_t record) {
    const int32_t expert = record - visit.row * shape_.num_experts;
    count_[index(record)] += visit.num_tokens[index(expert)] * one;
    last_use_[index(record)] = ++tick_;
  });
  rate(visit);
  return begins_step;
}

void Policy::begin_step(double tokens) {
  ++num_steps_;
  now_half_lives_ += std::min(tokens / shape_.half_life_tokens, 1.0);
  if (now_half_lives_ > kMaxHalfLives) rebase();
  // The mean of 2^(-age / half-life) over the step's tokens.
  const double ratio = std::exp2(-1.0 / shape_.half_life_tokens);
  token_weight_ = tokens > 1 ? (1.0 - std::pow(ratio, tokens)) / ((1.0 - ratio) * tokens) : 1.0;
}

void Policy::rebase() {
  const double factor = std::exp2(-now_half_lives_);
  for (double& count : count_) count *= factor;
  now_half_lives_ = 0.0;
  rate_all();
}

void Policy::insert(int32_t record) {
  victims_.insert(record);
  inserted(record);
}

void Policy::evict(int32_t record) {
  victims_.remove(record);
  evicted(record);
}

std::vector<double> Policy::frequencies() const {
  std::vector<double> result(count_);
  const double factor = std::exp2(-now_half_lives_);
  for (double& value : result) value *= factor;
  return result;
}

void Policy::set_frequencies(std::span<const double> frequencies) {
  count_.assign(frequencies.begin(), frequencies.end());
  now_half_lives_ = 0.0;
  rate_all();
}

}  // namespace headrace::store
