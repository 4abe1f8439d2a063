// The routing of a run, as bytes and back: docs/traces.md has the format. Knows no files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace headrace::store {

// Consecutive rows of a step that belong to one sequence.
struct TracePart {
  uint64_t sequence;
  int32_t num_tokens;
  bool is_prefill;
};

// Collects entries until they are taken. Not locked: its owner is.
class TraceBuffer {
 public:
  explicit TraceBuffer(int32_t num_experts) : has_wide_ids_(num_experts > 256) {}

  void step(std::span<const TracePart> parts);
  // ids: [T, A] of the layer in row `row` of the record table.
  void visit(int32_t row, std::span<const int32_t> ids, int32_t num_tokens);
  std::vector<std::byte> take();

 private:
  void put(uint64_t value);  // as a varint

  bool has_wide_ids_;
  std::vector<std::byte> bytes_;
};

// A trace in memory, checked: every row and id is in range.
struct Trace {
  struct Visit {
    int32_t row;
    int32_t num_tokens;  // T
    int32_t num_active;  // A
    size_t first_id;     // of T * A in ids
  };
  struct Step {
    size_t first_visit;
    int32_t num_prefill_tokens;
    int32_t num_decode_tokens;
  };

  int32_t num_rows = 0;
  int32_t num_experts = 0;
  std::vector<int32_t> ids;
  std::vector<Visit> visits;
  std::vector<Step> steps;

  Trace(int32_t num_rows, int32_t num_experts) : num_rows(num_rows), num_experts(num_experts) {}

  // Appends one block's entries. Throws Error(Checkpoint) that names the offset within the block,
  // and keeps what came before.
  void add(std::span<const std::byte> block);
  std::span<const int32_t> ids_of(const Visit& visit) const;
};

}  // namespace headrace::store
