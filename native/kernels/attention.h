// Keys and values in pages, and attention over them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/thread_pool.h"
#include "kernels/format.h"

namespace headrace {

// The shape of a pool of pages. A page holds page_tokens tokens of one sequence in all layers, for
// each layer and kv head keys [head_dim][page_tokens] and values [page_tokens][head_dim].
// Keys lie with the tokens side by side, because a score is a chain over head_dim in each lane.
// In q8 both are int8 codes, followed by one f16 scale per token and 32 dims,
// [groups][page_tokens]; an item is code * scale, which float32 holds exactly.
struct KvShape {
  int32_t num_layers, num_pages, num_kv_heads, head_dim, page_tokens;
  Format dtype;  // F32, F16, BF16 or Q8

  int64_t head_bytes() const;  // the keys, or the values, of one kv head of one page
  int64_t page_bytes() const { return int64_t{num_layers} * num_kv_heads * 2 * head_bytes(); }
  int64_t nbytes() const { return num_pages * page_bytes(); }
};

int64_t kv_item_bytes(Format dtype);  // without scales
// Bytes of `width` items for page_tokens tokens, scales included.
int64_t kv_items_bytes(Format dtype, int32_t width, int32_t page_tokens);

// Throws Error(Shape) unless pools can hold this type, width and page size. `pool` names the class.
void check_kv_page(const char* pool, Format dtype, int32_t page_tokens);

// Pages of which one head of one layer lies in one piece: a walk over them is one stream of memory,
// which the processor fetches ahead by itself. More would be little faster, and touch more memory
// for the first tokens.
inline constexpr int32_t kPagesTogether = 16;

// [groups of kPagesTogether pages, the last may have fewer][layers][kv heads][pages of the group]
// [keys, values].
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

  const int32_t* pages(int32_t row) const {
    return page_table + int64_t{sequences[row]} * max_pages;
  }
};

// What a row sees of its sequence, and how.
struct AttentionParams {
  float scale;
  int32_t window;      // the last so many positions, its own included; 0: all
  const float* sinks;  // [heads], a further score of each head without a value; null: none

  int32_t first_seen(int32_t position) const {
    return window == 0 || position < window ? 0 : position - window + 1;
  }
};

// Throws Error(Shape) if a row points outside the table, or needs a page outside the pool.
void check_step_rows(int32_t page_tokens, int32_t num_pages, int32_t window, const StepRows& rows,
                     const char* op);

// Rounds k and v [T, kv_heads, head_dim] to the pool's type and puts them at their rows' positions.
void kv_write(ThreadPool& threads, const KvPool& pool, int32_t layer, const float* k,
              const float* v, const StepRows& rows);

// q [T, heads, head_dim] -> out [T, heads, head_dim]. Row t sees the positions of its sequence up
// to positions[t]. Pages in ascending order; each page by itself (scores, maximum, exponentials,
// tree sum, chain over its values), then merged into the state by online softmax: the bits depend
// on the sequence and the page size only. A sink joins last.
void paged_attention(ThreadPool& threads, const KvPool& pool, int32_t layer, const float* q,
                     int32_t num_heads, const AttentionParams& params, const StepRows& rows,
                     float* out);

}  // namespace headrace
