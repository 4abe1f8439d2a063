// Every eviction policy against its plain rule, and the replay of traces against both.
#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "store/lookahead.h"
#include "store/policy.h"
#include "store/replay.h"
#include "store/trace.h"
#include "store/victims.h"

using namespace headrace;
using store::Policy;
using store::PolicyKind;
using test::check;

namespace {

constexpr int32_t kRecords = 40;  // in one layer
constexpr double kHalfLife = 8.0;

size_t index(int32_t value) { return static_cast<size_t>(value); }

std::unique_ptr<Policy> make(PolicyKind kind, int32_t num_slots = 10, int32_t records = kRecords,
                             double half_life = kHalfLife) {
  return Policy::make(kind, {1, records, num_slots, half_life});
}

// One step of `tokens` tokens that all go to the same experts.
void use(Policy& policy, std::vector<int32_t> experts, int32_t tokens = 1,
         int32_t records = kRecords, int32_t row = 0) {
  std::vector<int32_t> num_tokens(index(records), 0);
  std::vector<int32_t> ids;
  for (int32_t t = 0; t < tokens; ++t) {
    for (const int32_t expert : experts) {
      ids.push_back(expert);
      ++num_tokens[index(expert)];
    }
  }
  policy.visit({row, ids, num_tokens, tokens});
}

// Drives a policy and a rule with the same random uses, insertions and evictions; after each, the
// victim must be the candidate that the rule rates least.
struct Rule {
  std::function<void(int32_t record, int32_t tokens)> used;
  std::function<void(int32_t record)> evicted;
  std::function<double(int32_t record)> worth;
};

void compare(PolicyKind kind, const Rule& rule, double tolerance) {
  const auto policy = make(kind);
  std::mt19937 random(5);
  const auto pick = [&](int32_t limit) {
    return static_cast<int32_t>(random() % static_cast<uint32_t>(limit));
  };
  std::vector<bool> is_candidate(kRecords, false);
  for (int32_t step = 0; step < 20'000; ++step) {
    const int32_t record = pick(kRecords);
    switch (pick(3)) {
      case 0: {
        const int32_t tokens = 1 + pick(20);
        use(*policy, {record}, tokens);
        rule.used(record, tokens);
        break;
      }
      case 1: {
        if (!is_candidate[index(record)]) policy->insert(record);
        is_candidate[index(record)] = true;
        break;
      }
      default:
        if (!is_candidate[index(record)]) break;
        policy->evict(record);
        rule.evicted(record);
        is_candidate[index(record)] = false;
    }
    double least = INFINITY;
    for (int32_t other = 0; other < kRecords; ++other) {
      if (is_candidate[index(other)]) least = std::min(least, rule.worth(other));
    }
    const int32_t victim = policy->victim();
    check((victim < 0) == (least == INFINITY));
    if (victim < 0) continue;
    check(is_candidate[index(victim)] && policy->contains(victim));
    check(rule.worth(victim) <= least * (1 + tolerance) + 1e-300, "the victim is not the least");
    if (step % 500 == 0) check(policy->is_consistent());
  }
}

void test_frequency_against_a_plain_rule() {
  std::vector<double> score(kRecords, 0.0);
  Rule rule;
  rule.used = [&](int32_t record, int32_t tokens) {
    const double decay = std::exp2(-std::min(tokens / kHalfLife, 1.0));
    for (double& value : score) value *= decay;
    // The tokens of a step count as if they had come one by one.
    for (int32_t age = 0; age < tokens; ++age) score[index(record)] += std::exp2(-age / kHalfLife);
  };
  rule.evicted = [](int32_t) {};
  rule.worth = [&](int32_t record) { return score[index(record)]; };
  compare(PolicyKind::Frequency, rule, 1e-9);
}

void test_lru_against_a_plain_rule() {
  std::vector<double> last(kRecords, 0.0);
  double now = 0.0;
  Rule rule;
  rule.used = [&](int32_t record, int32_t) { last[index(record)] = ++now; };
  rule.evicted = [](int32_t) {};
  rule.worth = [&](int32_t record) { return last[index(record)]; };
  compare(PolicyKind::Lru, rule, 0.0);
}

void test_slru_keeps_what_was_used_twice() {
  const auto policy = make(PolicyKind::Slru, 10);  // at most 8 protected
  for (int32_t record = 0; record < 10; ++record) {
    use(*policy, {record});
    policy->insert(record);
  }
  use(*policy, {0});  // used while held
  for (int32_t record = 1; record < 10; ++record) {
    check(policy->victim() == record, "the oldest of those used once");
    policy->evict(record);
  }
  check(policy->victim() == 0);
  for (int32_t record = 1; record < 10; ++record) policy->insert(record);
  for (int32_t record = 1; record < 9; ++record) use(*policy, {record});
  check(policy->victim() == 9, "never used again");
  policy->evict(9);
  check(policy->victim() == 0, "too many are protected: the oldest of them goes back");
  policy->evict(0);
  check(policy->victim() == 1);
  check(policy->is_consistent());
}

void test_ties_fall_to_the_least_recent() {
  const auto policy = make(PolicyKind::Frequency, 10, 4, 1e9);
  for (const int32_t record : {2, 0, 3, 1}) use(*policy, {record}, 1, 4);
  for (const int32_t record : {0, 1, 2, 3}) policy->insert(record);
  for (const int32_t expected : {2, 0, 3, 1}) {
    check(policy->victim() == expected);
    policy->remove(expected);
  }
  check(policy->victim() == -1);
}

void test_frequency_over_long_times() {
  const auto policy = make(PolicyKind::Frequency, 10, 3, 1.0);
  for (const int32_t record : {0, 1, 2}) policy->insert(record);
  use(*policy, {0}, 1000, 3);
  for (int i = 0; i < 5'000; ++i) {
    use(*policy, i % 2 == 0 ? std::vector<int32_t>{1, 2} : std::vector<int32_t>{1}, 1, 3);
    check(policy->is_consistent());
  }
  check(policy->victim() == 0, "old glory fades");
  check(std::abs(policy->frequencies()[1] - 2.0) < 1e-9, "a token per step settles at two");
}

void test_a_history_orders_what_was_not_used_yet() {
  const std::vector<double> counts{3.0, 0.5, 0.0, 9.0};
  for (const PolicyKind kind :
       {PolicyKind::Frequency, PolicyKind::NextUse, PolicyKind::Slru, PolicyKind::Lru}) {
    const auto policy = make(kind, 10, 4);
    policy->set_frequencies(counts);
    for (int32_t record = 0; record < 4; ++record) policy->insert(record);
    for (const int32_t expected : {2, 1, 0, 3}) {
      check(policy->victim() == expected);
      policy->evict(expected);
    }
  }
}

// Experts come in a fixed cycle. Recency always gives up the one that comes next; what has learned
// who follows whom gives up one that is far away.
void test_next_use_learns_a_cycle() {
  constexpr int32_t kCycle = 8;
  const auto policy = make(PolicyKind::NextUse, 2, kCycle);
  for (int32_t step = 0; step < 2'000; ++step) use(*policy, {step % kCycle}, 1, kCycle);
  for (int32_t record = 0; record < kCycle; ++record) policy->insert(record);
  for (int32_t step = 2'000; step < 2'000 + 3 * kCycle; ++step) {
    use(*policy, {step % kCycle}, 1, kCycle);
    check(policy->victim() != (step + 1) % kCycle, "gives up what comes next");
    std::vector<int32_t> order;
    for (int32_t i = 0; i < kCycle; ++i) {
      order.push_back(policy->victim());
      policy->remove(policy->victim());
    }
    check(order.back() == (step + 1) % kCycle, "what comes next is not kept longest");
    for (const int32_t record : order) policy->insert(record);
  }
  check(policy->is_consistent());
}

// Of two layers' experts that are equally likely, those of the layer that comes first are kept.
void test_next_use_knows_the_order_of_layers() {
  const auto policy = Policy::make(PolicyKind::NextUse, {3, 4, 2, kHalfLife});
  const std::vector<int32_t> ids{1};
  const std::vector<int32_t> num_tokens{0, 1, 0, 0};
  for (int32_t step = 0; step < 50; ++step) {
    for (int32_t row = 0; row < 3; ++row) policy->visit({row, ids, num_tokens, 1});
  }
  for (const int32_t row : {0, 1, 2}) policy->insert(row * 4 + 1);
  for (const int32_t passed : {0, 1, 2}) {
    policy->visit({passed, ids, num_tokens, 1});
    check(policy->victim() == passed * 4 + 1, "the layer just passed comes last");
  }
}

void test_a_chunk_is_counted_by_every_policy() {
  for (const PolicyKind kind :
       {PolicyKind::Frequency, PolicyKind::NextUse, PolicyKind::Slru, PolicyKind::Lru}) {
    const auto policy = make(kind);
    use(*policy, {1, 2, 3}, 500);
    use(*policy, {4, 5}, 1);
    for (int32_t record = 0; record < kRecords; ++record) policy->insert(record);
    check(policy->victim() != 1 && policy->victim() != 4);
    const std::vector<double> counts = policy->frequencies();
    check(counts[1] > 0 && counts[0] == 0 && std::isfinite(counts[1]));
    check(policy->is_consistent());
    check(store::policy_bytes(kind, {1, kRecords, 10, kHalfLife}) > 0);
  }
}

void test_victim_tree_against_sorting() {
  std::mt19937 random(3);
  for (const int32_t size : {1, 2, 3, 7, 8, 33}) {
    store::VictimTree tree(size);
    std::vector<bool> is_in(index(size), false);
    for (int step = 0; step < 2'000; ++step) {
      const int32_t record = static_cast<int32_t>(random() % static_cast<uint32_t>(size));
      switch (random() % 4) {
        case 0:
          tree.insert(record);
          is_in[index(record)] = true;
          break;
        case 1:
          tree.remove(record);
          is_in[index(record)] = false;
          break;
        case 2:
          tree.set_worth(record, {static_cast<double>(random() % 8), step});
          break;
        default: {
          std::vector<store::Worth> worths(index(size - record));
          for (store::Worth& worth : worths) worth = {static_cast<double>(random() % 8), step};
          tree.set_worths(record, worths);
        }
      }
      int32_t expected = -1;
      for (int32_t other = 0; other < size; ++other) {
        if (!is_in[index(other)]) continue;
        if (expected < 0 || tree.precedes(other, expected)) expected = other;
      }
      check(tree.victim() == expected);
      check(tree.is_consistent());
    }
  }
}

// Replay

store::Trace make_trace(int32_t num_rows, int32_t num_experts, int32_t num_active,
                        int32_t num_steps, uint32_t seed) {
  std::mt19937 random(seed);
  store::TraceBuffer buffer(num_experts);
  for (int32_t step = 0; step < num_steps; ++step) {
    const int32_t tokens = step % 7 == 0 ? 3 : 1;
    const store::TracePart parts[] = {{0, tokens, tokens > 1}};
    buffer.step(parts);
    for (int32_t row = 0; row < num_rows; ++row) {
      std::vector<int32_t> ids;
      for (int32_t i = 0; i < tokens * num_active; ++i) {
        const uint32_t skewed = random() % (1 + random() % static_cast<uint32_t>(num_experts));
        ids.push_back(static_cast<int32_t>(skewed));
      }
      buffer.visit(row, ids, tokens);
    }
  }
  store::Trace trace(num_rows, num_experts);
  trace.add(buffer.take());
  return trace;
}

constexpr PolicyKind kKinds[] = {PolicyKind::Frequency, PolicyKind::NextUse, PolicyKind::Slru,
                                 PolicyKind::Lru};

void test_no_policy_beats_belady() {
  for (const uint32_t seed : {1U, 2U, 3U}) {
    const store::Trace trace = make_trace(3, 12, 2, 120, seed);
    int64_t before = INT64_MAX;
    for (int32_t num_slots = 2; num_slots <= 36; ++num_slots) {
      const store::ReplayResult best = store::replay_belady(trace, num_slots);
      const int64_t least = best.decode.misses + best.prefill.misses;
      check(least <= before, "more slots, more misses");
      before = least;
      for (const PolicyKind kind : kKinds) {
        const store::ReplayResult got = store::replay(trace, kind, {num_slots, 4, 16, 32.0});
        check(got.decode.misses + got.prefill.misses >= least);
        check(got.decode.requests == best.decode.requests);
        check(got.prefill.tokens == best.prefill.tokens);
        check(got.decode.steps + got.prefill.steps == 120);
      }
    }
    check(before <= 36, "with a slot for every record each is read once at most");
  }
}

// The fewest misses by trying everything that could be kept after each visit.
int64_t fewest(const std::vector<std::vector<int32_t>>& visits, size_t at, uint32_t held,
               int32_t num_slots) {
  if (at == visits.size()) return 0;
  uint32_t present = held;
  int64_t misses = 0;
  for (const int32_t record : visits[at]) {
    misses += (held >> record & 1U) == 0 ? 1 : 0;
    present |= 1U << record;
  }
  int64_t least = INT64_MAX;
  for (uint32_t kept = present;; kept = (kept - 1) & present) {
    if (__builtin_popcount(kept) <= num_slots) {
      least = std::min(least, fewest(visits, at + 1, kept, num_slots));
    }
    if (kept == 0) break;
  }
  return misses + least;
}

void test_belady_is_the_least_of_all() {
  for (uint32_t seed = 0; seed < 30; ++seed) {
    std::mt19937 random(seed);
    store::TraceBuffer buffer(5);
    std::vector<std::vector<int32_t>> visits;
    for (int32_t step = 0; step < 7; ++step) {
      std::vector<int32_t> ids{static_cast<int32_t>(random() % 5),
                               static_cast<int32_t>(random() % 5)};
      buffer.visit(0, ids, 1);
      std::sort(ids.begin(), ids.end());
      ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
      visits.push_back(ids);
    }
    store::Trace trace(1, 5);
    trace.add(buffer.take());
    const int64_t got = store::replay_belady(trace, 2).decode.misses;
    check(got == fewest(visits, 0, 0, 2), "not the least");
  }
}

void test_a_trace_comes_back() {
  for (const int32_t num_experts : {8, 256, 257, 512}) {
    store::TraceBuffer buffer(num_experts);
    const store::TracePart parts[] = {{7, 2, true}, {1'000'000, 1, false}};
    const std::vector<int32_t> ids{0, num_experts - 1, 1, 2, 3, num_experts / 2};
    buffer.step(parts);
    buffer.visit(2, ids, 3);
    const std::vector<std::byte> block = buffer.take();
    check(buffer.take().empty());
    store::Trace trace(3, num_experts);
    trace.add(block);
    check(trace.visits.size() == 1 && trace.steps.size() == 1);
    check(trace.steps[0].num_prefill_tokens == 2 && trace.steps[0].num_decode_tokens == 1);
    check(trace.visits[0].row == 2 && trace.visits[0].num_active == 2);
    const auto got = trace.ids_of(trace.visits[0]);
    check(std::equal(got.begin(), got.end(), ids.begin(), ids.end()));
    for (size_t length = 1; length < block.size(); ++length) {
      if (length == 8) continue;  // between the step and the visit: a whole entry
      const std::string message = test::message_of<Error>(
          [&] { store::Trace(3, num_experts).add(std::span(block).first(length)); });
      test::check_contains(message, "at byte");
    }
  }
}

// A drive that nothing is known of: whatever is likely enough is worth reading.
constexpr store::DriveView kUnknownDrive{
    .record_ns = 0.0, .spare_ns = 0.0, .num_queued = 0, .is_wanted = false};

std::vector<int32_t> named(store::Lookahead& lookahead, std::vector<int32_t> ids,
                           int32_t num_tokens, std::vector<int32_t> is_missing,
                           const store::DriveView& drive = kUnknownDrive) {
  const auto found = lookahead.name(1, ids, num_tokens, is_missing, drive);
  return {found.begin(), found.end()};
}

void test_lookahead_orders_what_it_names() {
  store::Lookahead lookahead(6);
  const std::vector<int32_t> all(6, 1);
  check(named(lookahead, {4, 0, 2}, 1, all) == std::vector<int32_t>{4, 0, 2});  // by place
  check(named(lookahead, {4, 0, 2}, 1, {0, 1, 1, 1, 1, 1}) == std::vector<int32_t>{4, 2});
  check(named(lookahead, {4, 0, 2, 5, 2, 0}, 2, all) ==
        std::vector<int32_t>{0, 2, 4, 5});  // by rows, then place
  const std::vector<int32_t> none(6, 0);
  lookahead.judge(0, none, {});  // another layer: nothing is known of it
  check(lookahead.stats().named == 0);
  const std::vector<int32_t> asked = {0, 0, 0, 0, 1, 1};
  for (int turn = 0; turn < 20; ++turn) {
    named(lookahead, {4, 0, 2}, 1, all);
    lookahead.judge(1, asked, {});
  }
  check(lookahead.stats().named == 60 && lookahead.stats().wanted == 40);
  check(lookahead.stats().right == 20);
  check(named(lookahead, {4, 0, 2}, 1, all) == std::vector<int32_t>{4});  // others: never right
  for (int turn = 0; turn < 40; ++turn) {  // of what was in memory nothing is learned
    named(lookahead, {0, 4, 2}, 1, {0, 1, 1, 1, 1, 1});
    lookahead.judge(1, std::vector<int32_t>{1, 0, 0, 0, 0, 0}, {});
  }
  check(named(lookahead, {4, 0, 2}, 1, all) == std::vector<int32_t>{4});
}

// Layers leave the drive unwaited for so long; of four named, the first `num_right` are right.
std::vector<int32_t> worth_reading(double window_ns, double record_ns, double spare_ns,
                                   int32_t num_queued, int32_t num_right) {
  store::Lookahead lookahead(8);
  const std::vector<int32_t> all(8, 1);
  std::vector<int32_t> asked(8, 0);
  std::fill_n(asked.begin(), num_right, 1);
  const store::DriveView drive{record_ns, spare_ns, num_queued, true};
  for (int turn = 0; turn < 300; ++turn) {
    named(lookahead, {0, 1, 2, 3}, 1, all, drive);
    lookahead.judge(1, asked, {.num_used = 0, .unawaited_ns = window_ns, .idle_ns = 0.0});
  }
  return named(lookahead, {0, 1, 2, 3}, 1, all, drive);
}

void test_lookahead_reads_what_pays() {
  using Ids = std::vector<int32_t>;
  check(worth_reading(10.0, 1.0, 0.0, 0, 4) == Ids{0, 1, 2, 3});  // all fit into the window
  check(worth_reading(10.0, 1.0, 0.0, 0, 2) == Ids{0, 1});        // the others are never right
  check(worth_reading(2.0, 1.0, 0.0, 0, 4) == Ids{0, 1});
  check(worth_reading(2.0, 1.0, 0.0, 1, 4) == Ids{0});        // one is on its way already
  check(worth_reading(2.0, 1.0, 1.0, 0, 4) == Ids{0, 1, 2});  // beside the layer's own reads
  check(worth_reading(0.5, 1.0, 0.0, 0, 4) == Ids{0});  // half of it is hidden, and it is right
  check(worth_reading(0.01, 1.0, 0.0, 0, 4).empty());
  store::Lookahead lookahead(8);
  const std::vector<int32_t> asked = {1, 0, 0, 0, 0, 0, 0, 0};
  bool is_right = false;  // every other time: half of a record must be hidden, then
  const auto run = [&](double window_ns) {
    Ids found;
    for (int turn = 0; turn < 400; ++turn) {
      found = named(lookahead, {0}, 1, Ids(8, 1), {1.0, 0.0, 0, true});
      is_right = !is_right;
      lookahead.judge(1, is_right ? asked : Ids(8, 0), {0, window_ns, 0.0});
    }
    return found;
  };
  check(run(0.6) == Ids{0});
  check(run(0.4).empty());
}

void test_lookahead_of_many_tokens_follows_the_idle_drive() {
  store::Lookahead lookahead(64);
  const int32_t num_tokens = 2 * store::Lookahead::kManyTokens;
  std::vector<int32_t> ids(static_cast<size_t>(num_tokens));
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i % 64);
  const auto run = [&](double idle_ns) {
    size_t count = 0;
    for (int turn = 0; turn < 100; ++turn) {
      count = named(lookahead, ids, num_tokens, std::vector<int32_t>(64, 1), {1.0, 0.0, 0, true})
                  .size();
      lookahead.judge(1, std::vector<int32_t>(64, 1), {0, 0.0, idle_ns});
    }
    return count;
  };
  check(run(20.0) == 64);
  check(run(0.5) <= 5);
  check(run(0.0) == 0);
  check(run(20.0) == 64);
}

void test_the_pace_of_a_drive() {
  store::ReadPace pace;
  check(pace.record_ns() == 0.0 && pace.spare_ns() == 0.0);
  for (int turn = 0; turn < 500; ++turn) pace.add(turn % 5, 3.0 + 2.0 * (turn % 5));
  check(std::abs(pace.record_ns() - 2.0) < 1e-6 && std::abs(pace.spare_ns() - 3.0) < 1e-6);
  store::ReadPace one_by_one;  // reads in turn: nothing is left beside them
  for (int turn = 0; turn < 500; ++turn) one_by_one.add(turn % 5, 2.0 * (turn % 5));
  check(std::abs(one_by_one.record_ns() - 2.0) < 1e-6 && one_by_one.spare_ns() < 1e-6);
  store::ReadPace always_alike;
  for (int turn = 0; turn < 500; ++turn) always_alike.add(4.0, 8.0);
  check(std::abs(always_alike.record_ns() - 2.0) < 1e-6);
}

void test_lookahead_rests_when_nothing_pays() {
  store::Lookahead lookahead(4);
  const std::vector<int32_t> all(4, 1);
  const std::vector<int32_t> asked = {1, 0, 0, 0};
  const auto step = [&](int32_t guess) {
    if (lookahead.is_on()) named(lookahead, {guess}, 1, all);
    lookahead.judge(1, asked, {});
  };
  for (int turn = 0; turn < 1000; ++turn) step(0);
  check(lookahead.is_on());
  for (int turn = 0; turn < 1000 && lookahead.is_on(); ++turn) step(1);
  check(!lookahead.is_on());
  int64_t rest = 0;
  for (; !lookahead.is_on(); ++rest) lookahead.judge(1, asked, {});
  check(rest > 1000);  // then it gets another trial
}

}  // namespace

int main() {
  const test::Test tests[] = {
      {"frequency against a plain rule", test_frequency_against_a_plain_rule},
      {"lru against a plain rule", test_lru_against_a_plain_rule},
      {"slru keeps what was used twice", test_slru_keeps_what_was_used_twice},
      {"ties fall to the least recent", test_ties_fall_to_the_least_recent},
      {"frequency over long times", test_frequency_over_long_times},
      {"a history orders what was not used yet", test_a_history_orders_what_was_not_used_yet},
      {"next-use learns a cycle", test_next_use_learns_a_cycle},
      {"next-use knows the order of layers", test_next_use_knows_the_order_of_layers},
      {"a chunk is counted by every policy", test_a_chunk_is_counted_by_every_policy},
      {"victim tree against sorting", test_victim_tree_against_sorting},
      {"no policy beats Belady", test_no_policy_beats_belady},
      {"Belady is the least of all", test_belady_is_the_least_of_all},
      {"a trace comes back", test_a_trace_comes_back},
      {"lookahead orders what it names", test_lookahead_orders_what_it_names},
      {"lookahead reads what pays", test_lookahead_reads_what_pays},
      {"lookahead of many tokens follows the idle drive",
       test_lookahead_of_many_tokens_follows_the_idle_drive},
      {"the pace of a drive", test_the_pace_of_a_drive},
      {"lookahead rests when nothing pays", test_lookahead_rests_when_nothing_pays},
  };
  return test::run_all(tests);
}
