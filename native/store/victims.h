// Candidates for eviction, and the least worthy of them at once: a tournament over all records.
// Pure: keys in, a winner out.
//
// A leaf per record; a node names the least worthy candidate below it. One key costs the way to the
// root, all keys of a layer cost the layer's leaves and that way, the winner costs nothing.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace headrace::store {

// Less is given up first; of equal values the one last used longer ago.
struct Worth {
  double value = 0.0;
  int64_t last_use = 0;
};

class VictimTree {
 public:
  explicit VictimTree(int32_t num_records);

  void insert(int32_t record);
  void remove(int32_t record);
  bool contains(int32_t record) const { return winner_[leaf(record)] >= 0; }
  // The least worthy candidate, -1 if there is none.
  int32_t victim() const { return winner_[1]; }

  const Worth& worth(int32_t record) const { return worth_[static_cast<size_t>(record)]; }
  void set_worth(int32_t record, const Worth& worth);
  // Of the records from `first` on.
  void set_worths(int32_t first, std::span<const Worth> worths);
  bool precedes(int32_t left, int32_t right) const;

  // True if every node names the winner of its children: for tests and debug_check.
  bool is_consistent() const;

 private:
  size_t leaf(int32_t record) const { return num_leaves_ + static_cast<size_t>(record); }
  int32_t better(int32_t left, int32_t right) const;
  void play(size_t node);
  void climb(int32_t record);

  size_t num_leaves_;  // a power of two, at least 2
  std::vector<Worth> worth_;
  std::vector<int32_t> winner_;  // node i has the children 2i and 2i + 1; -1: no candidate
};

}  // namespace headrace::store
