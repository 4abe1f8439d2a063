// Experts that lie whole in memory, as a RecordFeed and as a RecordSource: for tests, and for
// models without a store.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/record_feed.h"

namespace headrace {

class MemoryFeed final : public RecordFeed {
 public:
  // ids ascending; order: the indices in the order in which next_ready gives them, `step` at a
  // time. The records must outlive the feed and lie at multiples of 64.
  MemoryFeed(ExpertLayout layout, std::vector<int32_t> ids, std::vector<const std::byte*> records,
             std::vector<int32_t> order, int32_t step)
      : layout_(layout),
        ids_(std::move(ids)),
        records_(std::move(records)),
        order_(std::move(order)),
        step_(step),
        is_done_(ids_.size(), false) {}

  std::span<const int32_t> expert_ids() const override { return ids_; }
  const ExpertLayout& layout() const override { return layout_; }

  int32_t next_ready(std::span<int32_t> out) override {
    int32_t count = 0;
    while (next_ < order_.size() && count < step_ && count < static_cast<int32_t>(out.size())) {
      out[static_cast<size_t>(count++)] = order_[next_++];
    }
    return count;
  }

  const std::byte* data(int32_t index) const override {
    return records_[static_cast<size_t>(index)];
  }

  void done(int32_t index) override { is_done_[static_cast<size_t>(index)] = true; }

  // Whether every record was given back; the feed can then be used again.
  bool rewind() {
    bool all = true;
    for (bool done : is_done_) all = all && done;
    is_done_.assign(is_done_.size(), false);
    next_ = 0;
    return all;
  }

 private:
  ExpertLayout layout_;
  std::vector<int32_t> ids_;
  std::vector<const std::byte*> records_;
  std::vector<int32_t> order_;
  int32_t step_;
  size_t next_ = 0;
  std::vector<bool> is_done_;
};

// One layer's experts. Its feeds give the highest id first and one record at a time: an order of
// arrival that nobody may notice.
class MemorySource final : public RecordSource {
 public:
  // As for MemoryFeed.
  MemorySource(ExpertLayout layout, std::vector<int32_t> ids, std::vector<const std::byte*> records)
      : layout_(layout), ids_(std::move(ids)), records_(std::move(records)) {}

  const ExpertLayout& layout(int32_t /*layer*/) const override { return layout_; }

  std::unique_ptr<RecordFeed> feed(int32_t layer, std::span<const int32_t> ids, int32_t) override {
    std::vector<int32_t> wanted(ids.begin(), ids.end());
    std::sort(wanted.begin(), wanted.end());
    wanted.erase(std::unique(wanted.begin(), wanted.end()), wanted.end());
    std::vector<const std::byte*> records;
    for (const int32_t id : wanted) {
      const auto found = std::lower_bound(ids_.begin(), ids_.end(), id);
      if (layer != 0 || found == ids_.end() || *found != id) {
        throw Error(ErrorKind::Shape, "no record of layer " + std::to_string(layer) + ", expert " +
                                          std::to_string(id));
      }
      records.push_back(records_[static_cast<size_t>(found - ids_.begin())]);
    }
    std::vector<int32_t> order(wanted.size());
    std::iota(order.rbegin(), order.rend(), 0);
    return std::make_unique<MemoryFeed>(layout_, wanted, records, order, 1);
  }

 private:
  ExpertLayout layout_;
  std::vector<int32_t> ids_;
  std::vector<const std::byte*> records_;
};

}  // namespace headrace
