// Keys and values in pages, and attention over them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/thread_pool.h"
#include "kernels/format.h"

namespace headrace {

// The shape of a pool of pages. A page holds page_tokens tokens of one sequence in all layers:
//   [layer][keys, values], keys [kv_head][head_dim][page_tokens], values
//   [kv_head][page_tokens][head_dim].
// Keys lie with the tokens side by side, because a score is a chain over head_dim in each lane.
struct KvShape {
  int32_t num_layers, num_pages, num_kv_heads, head_dim, page_tokens;
  Format dtype;  // F32, F16 or BF16

  int64_t item_bytes() const { return dtype == Format::F32 ? 4 : 2; }
  int64_t half_items() const { return int64_t{num_kv_heads} * head_dim * page_tokens; }
  int64_t page_bytes() const { return num_layers * 2 * half_items() * item_bytes(); }
  int64_t nbytes() const { return num_pages * page_bytes(); }
};

class KvPool {
 public:
  // Throws Error(Shape) for a shape the kernels cannot take. `memory` holds shape.nbytes() bytes at
  // a multiple of 64; its contents do not matter.
  KvPool(const KvShape& shape, std::shared_ptr<std::byte> memory);

  const KvShape& shape() const { return shape_; }
  std::byte* keys(int32_t page, int32_t layer, int32_t kv_head) const;
  std::byte* values(int32_t page, int32_t layer, int32_t kv_head) const;

 private:
  KvShape shape_;
  std::shared_ptr<std::byte> memory_;
};

void check_kv_shape(const KvShape& shape);

// Where each row of a step stands: its position in its sequence, and the sequence's pages.
struct StepRows {
  const int32_t* positions;   // [T]
  const int32_t* sequences;   // [T] rows of page_table
  const int32_t* page_table;  // [B, P]
  int32_t num_rows, num_sequences, max_pages;
};

// Throws Error(Shape) if a row points outside the table or the pool.
void check_step_rows(const KvPool& pool, const StepRows& rows, const char* op);

// Rounds k and v [T, kv_heads, head_dim] to the pool's type and puts them at their rows' positions.
void kv_write(ThreadPool& threads, const KvPool& pool, int32_t layer, const float* k,
              const float* v, const StepRows& rows);

// q [T, heads, head_dim] -> out [T, heads, head_dim]. Row t sees positions 0..positions[t] of its
// sequence. Pages in ascending order; each page by itself (scores, maximum, exponentials, tree sum,
// chain over its values), then merged into the state by online softmax: the bits depend on the
// sequence and the page size only.
void paged_attention(ThreadPool& threads, const KvPool& pool, int32_t layer, const float* q,
                     int32_t num_heads, float scale, const StepRows& rows, float* out);

}  // namespace headrace
