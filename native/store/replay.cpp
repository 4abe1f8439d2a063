#include "store/replay.h"

#include <algorithm>
#include <deque>
#include <limits>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"

namespace headrace::store {
namespace {

size_t index(int64_t value) { return static_cast<size_t>(value); }

void check_slots(int32_t num_slots) {
  if (num_slots >= 2) return;
  throw Error(ErrorKind::Config,
              "a replay needs at least 2 slots, got " + std::to_string(num_slots));
}

// Calls `use(visit, records, num_tokens)` for every visit and adds up what it returns, the misses,
// under the kind of step that the visit belongs to.
template <typename Use>
ReplayResult for_each_visit(const Trace& trace, Use use) {
  ReplayResult result;
  ReplayCounts* counts = &result.prefill;
  size_t next_step = 0;
  int32_t last_row = -1;
  std::vector<int32_t> num_tokens(index(trace.num_experts), 0);
  std::vector<int32_t> records;
  for (size_t i = 0; i < trace.visits.size(); ++i) {
    const Trace::Visit& visit = trace.visits[i];
    const Trace::Step* step = nullptr;  // several may begin here: only the last one ran
    for (; next_step < trace.steps.size() && trace.steps[next_step].first_visit == i; ++next_step) {
      step = &trace.steps[next_step];
    }
    if (step != nullptr || visit.row <= last_row || last_row < 0) {
      const bool is_decode =
          step != nullptr ? step->num_prefill_tokens == 0 : visit.num_tokens == 1;
      counts = is_decode ? &result.decode : &result.prefill;
      ++counts->steps;
      counts->tokens += visit.num_tokens;
    }
    last_row = visit.row;
    std::fill(num_tokens.begin(), num_tokens.end(), 0);
    for (const int32_t id : trace.ids_of(visit)) ++num_tokens[index(id)];
    records.clear();
    for (int32_t expert = 0; expert < trace.num_experts; ++expert) {
      if (num_tokens[index(expert)] > 0) records.push_back(visit.row * trace.num_experts + expert);
    }
    counts->requests += static_cast<int64_t>(records.size());
    counts->misses += use(visit, records, num_tokens);
  }
  return result;
}

// The books of ExpertStore for one lease at a time.
class Cache {
 public:
  Cache(const Trace& trace, PolicyKind policy, const ReplayOptions& options)
      : options_(options),
        policy_(Policy::make(policy, {trace.num_rows, trace.num_experts, options.num_slots,
                                      options.half_life_tokens})),
        is_cached_(index(trace.num_rows) * index(trace.num_experts), false),
        num_free_(options.num_slots) {}

  int64_t serve(const Visit& visit, std::span<const int32_t> records) {
    std::vector<int32_t> hits;
    std::deque<int32_t> waiting;
    for (const int32_t record : records) {
      if (is_cached_[index(record)]) {
        policy_->remove(record);  // pinned
        hits.push_back(record);
      } else {
        waiting.push_back(record);
      }
    }
    const int64_t num_misses = static_cast<int64_t>(waiting.size());
    policy_->visit(visit);
    std::deque<int32_t> ahead;
    issue(waiting, ahead);
    for (const int32_t record : hits) {
      policy_->insert(record);
      issue(waiting, ahead);
    }
    while (!ahead.empty()) {
      policy_->insert(ahead.front());
      ahead.pop_front();
      issue(waiting, ahead);
    }
    return num_misses;
  }

 private:
  void issue(std::deque<int32_t>& waiting, std::deque<int32_t>& ahead) {
    while (!waiting.empty()) {
      const int32_t num_ahead = static_cast<int32_t>(ahead.size());
      if (num_ahead >= options_.read_ahead && num_ahead > 0) return;
      const bool may_evict_hotter = num_ahead < options_.num_readers;
      if (!take_slot(may_evict_hotter ? -1 : waiting.front())) return;
      is_cached_[index(waiting.front())] = true;
      ahead.push_back(waiting.front());
      waiting.pop_front();
    }
  }

  bool take_slot(int32_t colder_than) {
    if (num_free_ > 0) return --num_free_, true;
    const int32_t victim = policy_->victim();
    if (victim < 0 || (colder_than >= 0 && policy_->is_hotter(victim, colder_than))) return false;
    policy_->evict(victim);
    is_cached_[index(victim)] = false;
    return true;
  }

  ReplayOptions options_;
  std::unique_ptr<Policy> policy_;
  std::vector<bool> is_cached_;
  int32_t num_free_;
};

// For each request in the order of for_each_visit, the visit that asks for the record next.
std::vector<size_t> next_visits(const Trace& trace) {
  std::vector<size_t> next;
  std::vector<std::vector<int32_t>> all;
  for_each_visit(trace, [&](const Trace::Visit&, const std::vector<int32_t>& records,
                            const std::vector<int32_t>&) {
    all.push_back(records);
    return 0;
  });
  size_t num_requests = 0;
  for (const auto& records : all) num_requests += records.size();
  next.resize(num_requests);
  std::vector<size_t> seen(index(trace.num_rows) * index(trace.num_experts),
                           std::numeric_limits<size_t>::max());
  for (size_t visit = all.size(); visit-- > 0;) {
    for (size_t i = all[visit].size(); i-- > 0;) {
      const size_t record = index(all[visit][i]);
      next[--num_requests] = seen[record];
      seen[record] = visit;
    }
  }
  return next;
}

}  // namespace

ReplayResult replay(const Trace& trace, PolicyKind policy, const ReplayOptions& options) {
  check_slots(options.num_slots);
  Cache cache(trace, policy, options);
  return for_each_visit(trace, [&](const Trace::Visit& visit, const std::vector<int32_t>& records,
                                   const std::vector<int32_t>& num_tokens) {
    return cache.serve({visit.row, trace.ids_of(visit), num_tokens, visit.num_tokens}, records);
  });
}

ReplayResult replay_belady(const Trace& trace, int32_t num_slots) {
  check_slots(num_slots);
  const std::vector<size_t> next = next_visits(trace);
  std::set<std::pair<size_t, int32_t>> held;  // by next use
  std::vector<size_t> next_use(index(trace.num_rows) * index(trace.num_experts), 0);
  size_t request = 0;
  return for_each_visit(trace, [&](const Trace::Visit&, const std::vector<int32_t>& records,
                                   const std::vector<int32_t>&) {
    int64_t num_misses = 0;
    for (const int32_t record : records) {
      num_misses += held.erase({next_use[index(record)], record}) == 0 ? 1 : 0;
      next_use[index(record)] = next[request++];
      held.insert({next_use[index(record)], record});
    }
    while (held.size() > index(num_slots)) held.erase(std::prev(held.end()));
    return num_misses;
  });
}

}  // namespace headrace::store
