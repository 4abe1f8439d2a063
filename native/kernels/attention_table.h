// What attention asks of an instruction set: the arguments and entries of its part of KernelTable.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/record_feed.h"

namespace headrace {

inline constexpr int32_t kMaxPageTokens = 256;
inline constexpr int32_t kMaxHeadDim = 512;
inline constexpr int32_t kMaxLatentWidth = 1024;
inline constexpr int32_t kKvGroup = 32;    // dims of a key, value or latent that share a q8 scale
inline constexpr int32_t kNumKvTypes = 4;  // F32, F16, BF16, Q8: the first values of Format
static_assert(static_cast<int32_t>(Format::Q8) + 1 == kNumKvTypes);

// Queries that share every load and widening of a key or a value. Eight of them fill the registers:
// 8 x 2 accumulators, 2 widened vectors and a query's dim of the 32 that AVX-512 has.
inline constexpr int32_t kQueriesTogether = 8;
// Query heads per walk over latents: two vectors with the heads side by side.
inline constexpr int32_t kLatentHeads = 32;

// The queries of a page come in blocks of 8, then 4, 2 and 1, whatever is left; a block lies in
// memory as [head_dim][queries]. Constants and functions here have internal linkage, because units
// with other instruction sets include them.
static constexpr int32_t block_of(int32_t queries_left) {
  int32_t block = kQueriesTogether;
  while (block > queries_left) block /= 2;
  return block;
}

// The state of a query: its accumulator, maximum and sum. A sum of 0 says that it holds nothing.
static constexpr int32_t state_stride(int32_t width) { return (width + 2 + 15) / 16 * 16; }

// Keys and values of one kv head in one page, as stored (KvPool).
struct PageArgs {
  const std::byte* keys;       // [head_dim][page_tokens]; q8: then f16 scales [groups][page_tokens]
  const std::byte* values;     // [page_tokens][head_dim]; q8: then f16 scales [groups][page_tokens]
  const std::byte* next_keys;  // of the page that follows, to be fetched; null after the last
  int32_t head_dim;
  int32_t page_tokens;  // a multiple of 16, at most kMaxPageTokens
  float scale;
};

// One query head of one row.
struct PageQuery {
  int32_t begin, end;  // the keys of this page that it sees; none where begin >= end
  float* state;        // of width head_dim
};

// One page of latents, seen by up to kLatentHeads query heads of one row.
struct LatentArgs {
  const std::byte* latents;  // [page_tokens][width]; q8: then f16 scales [groups][page_tokens]
  const std::byte* next;     // the page that follows; null after the last
  int32_t width;
  int32_t value_dim;    // leading dims that are the values
  int32_t page_tokens;  // a multiple of 16, at most kMaxPageTokens
  float scale;
  int32_t begin, end;  // the tokens that the row sees; begin < end
  int32_t num_heads;
  const float* queries;  // [width][kLatentHeads], 0 beyond num_heads
  float* scratch;        // latent_scratch(width, page_tokens)
  float* states;         // kLatentHeads of state_stride(value_dim)
};
static constexpr int64_t latent_scratch(int32_t width, int32_t page_tokens) {
  return (int64_t{width} + kLatentHeads + width / kKvGroup + 1) * page_tokens;
}

struct AttentionTable {
  // By Format. `packed` holds the queries' blocks.
  void (*attend_page[kNumKvTypes])(const PageArgs& page, const PageQuery* queries, int32_t count,
                                   const float* packed);
  void (*attend_latents[kNumKvTypes])(const LatentArgs& page);
  // `part` joins `state`, as a page does.
  void (*join_state)(const float* part, int32_t width, float* state);
  // out = accumulator / sum; a sink is one more score, without a value (null: none).
  void (*finish_state)(const float* state, int32_t width, const float* sink, float* out);
};

}  // namespace headrace
