#include "store/victims.h"

#include <algorithm>
#include <bit>

namespace headrace::store {

VictimTree::VictimTree(int32_t num_records)
    : num_leaves_(std::bit_ceil(static_cast<size_t>(std::max(num_records, 2)))),
      worth_(static_cast<size_t>(num_records)),
      winner_(2 * num_leaves_, -1) {}

void VictimTree::insert(int32_t record) {
  winner_[leaf(record)] = record;
  climb(record);
}

void VictimTree::remove(int32_t record) {
  winner_[leaf(record)] = -1;
  climb(record);
}

void VictimTree::set_worth(int32_t record, const Worth& worth) {
  worth_[static_cast<size_t>(record)] = worth;
  if (contains(record)) climb(record);
}

void VictimTree::set_worths(int32_t first, std::span<const Worth> worths) {
  if (worths.empty()) return;
  std::copy(worths.begin(), worths.end(), worth_.begin() + first);
  size_t low = leaf(first);
  size_t high = low + worths.size() - 1;
  while (low > 1) {
    low /= 2;
    high /= 2;
    for (size_t node = low; node <= high; ++node) play(node);
  }
}

bool VictimTree::precedes(int32_t left, int32_t right) const {
  const Worth& a = worth(left);
  const Worth& b = worth(right);
  if (a.value != b.value) return a.value < b.value;
  if (a.last_use != b.last_use) return a.last_use < b.last_use;
  return left < right;  // never used: any order, as long as it is one
}

int32_t VictimTree::better(int32_t left, int32_t right) const {
  if (left < 0) return right;
  if (right < 0) return left;
  return precedes(right, left) ? right : left;
}

void VictimTree::play(size_t node) {
  winner_[node] = better(winner_[2 * node], winner_[2 * node + 1]);
}

void VictimTree::climb(int32_t record) {
  for (size_t node = leaf(record) / 2; node >= 1; node /= 2) play(node);
}

bool VictimTree::is_consistent() const {
  for (size_t node = 1; node < num_leaves_; ++node) {
    if (winner_[node] != better(winner_[2 * node], winner_[2 * node + 1])) return false;
  }
  for (size_t i = 0; i < num_leaves_; ++i) {
    const int32_t winner = winner_[num_leaves_ + i];
    if (winner >= 0 && static_cast<size_t>(winner) != i) return false;
  }
  return true;
}

}  // namespace headrace::store
