#include "kernels/attention.h"

#include <algorithm>
#include <string>
#include <vector>

#include "base/array_pool.h"
#include "base/error.h"
#include "kernels/attention_table.h"
#include "kernels/attention_walk.h"
#include "kernels/kernel_table.h"
#include "kernels/kv_items.h"

namespace headrace {
namespace {

// Rows of one sequence that read a page together.
constexpr int32_t kRowsPerTile = 16;

[[noreturn]] void throw_shape(const std::string& message) {
  throw Error(ErrorKind::Shape, message);
}

// Consecutive rows [begin, end) of one sequence.
struct RowTile {
  int32_t begin, end;
};

std::vector<RowTile> tiles_of(const StepRows& rows) {
  std::vector<RowTile> tiles;
  for (int32_t row = 0; row < rows.num_rows; ++row) {
    const bool joins = !tiles.empty() && row - tiles.back().begin < kRowsPerTile &&
                       rows.sequences[row] == rows.sequences[tiles.back().begin];
    if (joins) {
      tiles.back().end = row + 1;
    } else {
      tiles.push_back({row, row + 1});
    }
  }
  return tiles;
}

// A walk is one kv head of one tile: its rows times the query heads of that kv head.
class GroupedWalks {
 public:
  GroupedWalks(const KvPool& pool, int32_t layer, const float* q, int32_t num_heads,
               const AttentionParams& params, const StepRows& rows, float* out)
      : shape_(pool.shape()),
        table_(kernels().attention),
        pool_(pool),
        layer_(layer),
        q_(q),
        num_heads_(num_heads),
        heads_per_kv_(num_heads / shape_.num_kv_heads),
        params_(params),
        rows_(rows),
        tiles_(tiles_of(rows)),
        out_(out) {
    for (const RowTile& tile : tiles_) most_rows_ = std::max(most_rows_, tile.end - tile.begin);
  }

  int64_t count() const { return static_cast<int64_t>(tiles_.size()) * shape_.num_kv_heads; }
  int32_t num_states() const { return most_rows_ * heads_per_kv_; }
  int32_t width() const { return shape_.head_dim; }

  PageRange pages(int64_t walk) const {
    const RowTile tile = tile_of(walk);
    int32_t first = rows_.positions[tile.begin];
    int32_t last = first;
    for (int32_t row = tile.begin; row < tile.end; ++row) {
      first = std::min(first, params_.first_seen(rows_.positions[row]));
      last = std::max(last, rows_.positions[row]);
    }
    return {first / shape_.page_tokens, last / shape_.page_tokens + 1};
  }

  void attend(int64_t walk, PageRange range, float* states, int64_t page_stride) const {
    const RowTile tile = tile_of(walk);
    const int32_t count = (tile.end - tile.begin) * heads_per_kv_;
    const PoolBuffer<float> packed(int64_t{count} * shape_.head_dim);
    pack_queries(walk, count, packed.get());
    std::vector<PageQuery> queries(static_cast<size_t>(count));
    const int32_t* page_of = rows_.pages(tile.begin);
    const int32_t kv_head = kv_head_of(walk);
    for (int32_t p = range.begin; p < range.end; ++p) {
      place_queries(tile, p, states + (p - range.begin) * page_stride, queries);
      const bool is_last = p + 1 == range.end;
      const PageArgs page{pool_.keys(page_of[p], layer_, kv_head),
                          pool_.values(page_of[p], layer_, kv_head),
                          is_last ? nullptr : pool_.keys(page_of[p + 1], layer_, kv_head),
                          shape_.head_dim,
                          shape_.page_tokens,
                          params_.scale};
      table_.attend_page[static_cast<int32_t>(shape_.dtype)](page, queries.data(), count,
                                                             packed.get());
    }
  }

  void finish(int64_t walk, const float* states) const {
    const RowTile tile = tile_of(walk);
    for (int32_t i = 0; i < (tile.end - tile.begin) * heads_per_kv_; ++i) {
      const int32_t head = kv_head_of(walk) * heads_per_kv_ + i % heads_per_kv_;
      table_.finish_state(states + i * int64_t{state_stride(shape_.head_dim)}, shape_.head_dim,
                          params_.sinks == nullptr ? nullptr : params_.sinks + head,
                          out_ + head_offset(walk, i));
    }
  }

 private:
  RowTile tile_of(int64_t walk) const {
    return tiles_[static_cast<size_t>(walk / shape_.num_kv_heads)];
  }
  int32_t kv_head_of(int64_t walk) const {
    return static_cast<int32_t>(walk % shape_.num_kv_heads);
  }
  // Query i of a walk is head i % heads_per_kv of row i / heads_per_kv.
  int64_t head_offset(int64_t walk, int32_t i) const {
    const int64_t row = tile_of(walk).begin + i / heads_per_kv_;
    const int32_t head = kv_head_of(walk) * heads_per_kv_ + i % heads_per_kv_;
    return (row * num_heads_ + head) * shape_.head_dim;
  }

  void pack_queries(int64_t walk, int32_t count, float* packed) const {
    for (int32_t done = 0; done < count;) {
      const int32_t block = block_of(count - done);
      for (int32_t i = 0; i < block; ++i) {
        const float* query = q_ + head_offset(walk, done + i);
        for (int32_t d = 0; d < shape_.head_dim; ++d) packed[d * block + i] = query[d];
      }
      packed += block * shape_.head_dim;
      done += block;
    }
  }

  void place_queries(RowTile tile, int32_t page, float* states,
                     std::vector<PageQuery>& queries) const {
    const int32_t before = page * shape_.page_tokens;
    for (int32_t i = 0; i < static_cast<int32_t>(queries.size()); ++i) {
      const int32_t position = rows_.positions[tile.begin + i / heads_per_kv_];
      queries[static_cast<size_t>(i)] = {std::max(params_.first_seen(position) - before, 0),
                                         std::min(position + 1 - before, shape_.page_tokens),
                                         states + i * int64_t{state_stride(shape_.head_dim)}};
    }
  }

  const KvShape& shape_;
  const AttentionTable& table_;
  const KvPool& pool_;
  int32_t layer_;
  const float* q_;
  int32_t num_heads_, heads_per_kv_;
  const AttentionParams& params_;
  const StepRows& rows_;
  std::vector<RowTile> tiles_;
  int32_t most_rows_ = 0;
  float* out_;
};

}  // namespace

int64_t kv_item_bytes(Format dtype) {
  return dtype == Format::F32 ? 4 : dtype == Format::Q8 ? 1 : 2;
}

int64_t kv_items_bytes(Format dtype, int32_t width, int32_t page_tokens) {
  if (dtype == Format::Q8) {
    const int64_t groups = (width + kKvGroup - 1) / kKvGroup;
    return (width + 2 * groups) * page_tokens;
  }
  return width * page_tokens * kv_item_bytes(dtype);
}

int64_t KvShape::head_bytes() const { return kv_items_bytes(dtype, head_dim, page_tokens); }

void check_kv_page(const char* pool, Format dtype, int32_t page_tokens) {
  if (page_tokens < 16 || page_tokens > kMaxPageTokens || page_tokens % 16 != 0) {
    throw_shape(std::string(pool) + ": page_tokens must be a multiple of 16, at most " +
                std::to_string(kMaxPageTokens) + ", got " + std::to_string(page_tokens));
  }
  if (static_cast<int32_t>(dtype) >= kNumKvTypes) {
    throw_shape(std::string(pool) + ": dtype must be f16, bf16, f32 or q8");
  }
}

void check_kv_shape(const KvShape& s) {
  if (s.num_layers < 1 || s.num_pages < 1 || s.num_kv_heads < 1) {
    throw_shape("KVPool: layers, pages and kv heads must be at least 1");
  }
  if (s.head_dim < 1 || s.head_dim > kMaxHeadDim) {
    throw_shape("KVPool: head_dim out of range\nexpected 1 to " + std::to_string(kMaxHeadDim) +
                ", got " + std::to_string(s.head_dim));
  }
  check_kv_page("KVPool", s.dtype, s.page_tokens);
}

KvPool::KvPool(const KvShape& shape, std::shared_ptr<std::byte> memory)
    : shape_(shape), memory_(std::move(memory)) {
  check_kv_shape(shape);
}

std::byte* KvPool::keys(int32_t page, int32_t layer, int32_t kv_head) const {
  const int32_t first = page / kPagesTogether * kPagesTogether;
  const int64_t together = std::min(kPagesTogether, shape_.num_pages - first);
  const int64_t run = int64_t{layer} * shape_.num_kv_heads + kv_head;
  return memory_.get() + first * shape_.page_bytes() +
         (run * together + page - first) * 2 * shape_.head_bytes();
}

std::byte* KvPool::values(int32_t page, int32_t layer, int32_t kv_head) const {
  return keys(page, layer, kv_head) + shape_.head_bytes();
}

void check_step_rows(int32_t page_tokens, int32_t num_pages, int32_t window, const StepRows& rows,
                     const char* op) {
  for (int32_t row = 0; row < rows.num_rows; ++row) {
    const int32_t position = rows.positions[row];
    const int32_t sequence = rows.sequences[row];
    const std::string where = std::string(op) + ": row " + std::to_string(row);
    if (sequence < 0 || sequence >= rows.num_sequences) {
      throw_shape(where + " has sequence " + std::to_string(sequence) + " of " +
                  std::to_string(rows.num_sequences));
    }
    if (position < 0 || position / page_tokens >= rows.max_pages) {
      throw_shape(where + " has position " + std::to_string(position) + ", beyond its " +
                  std::to_string(rows.max_pages) + " pages");
    }
    const int32_t first = AttentionParams{0.0f, window, nullptr}.first_seen(position);
    for (int32_t p = first / page_tokens; p <= position / page_tokens; ++p) {
      const int32_t page = rows.pages(row)[p];
      if (page < 0 || page >= num_pages) {
        throw_shape(where + " needs page " + std::to_string(page) + " of " +
                    std::to_string(num_pages));
      }
    }
  }
}

void kv_write(ThreadPool& threads, const KvPool& pool, int32_t layer, const float* k,
              const float* v, const StepRows& rows) {
  const KvShape& s = pool.shape();
  const int64_t item_bytes = kv_item_bytes(s.dtype);
  const int64_t items = int64_t{s.head_dim} * s.page_tokens * item_bytes;
  threads.run_ranges(int64_t{rows.num_rows} * s.num_kv_heads, 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const auto row = static_cast<int32_t>(i / s.num_kv_heads);
      const auto kv_head = static_cast<int32_t>(i % s.num_kv_heads);
      const int64_t slot = rows.positions[row] % s.page_tokens;
      const int32_t page = rows.pages(row)[rows.positions[row] / s.page_tokens];
      std::byte* keys = pool.keys(page, layer, kv_head);
      std::byte* values = pool.values(page, layer, kv_head);
      put_items(s.dtype, k + i * s.head_dim, s.head_dim,
                {keys + slot * item_bytes, keys + items + slot * 2, s.page_tokens, s.page_tokens});
      put_items(
          s.dtype, v + i * s.head_dim, s.head_dim,
          {values + slot * s.head_dim * item_bytes, values + items + slot * 2, 1, s.page_tokens});
    }
  });
}

void paged_attention(ThreadPool& threads, const KvPool& pool, int32_t layer, const float* q,
                     int32_t num_heads, const AttentionParams& params, const StepRows& rows,
                     float* out) {
  const GroupedWalks walks(pool, layer, q, num_heads, params, rows, out);
  WalkRunner<GroupedWalks>(threads, walks).run();
}

}  // namespace headrace
