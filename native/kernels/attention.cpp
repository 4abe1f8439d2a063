#include "kernels/attention.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "base/array_pool.h"
#include "base/error.h"
#include "kernels/kernel_table.h"
#include "kernels/small_float.h"

namespace headrace {
namespace {

// Rows of one sequence that share the widening of a page to float32.
constexpr int32_t kRowsPerTile = 16;

[[noreturn]] void throw_shape(const std::string& message) {
  throw Error(ErrorKind::Shape, message);
}

void put(std::byte* target, Format dtype, int64_t index, float value) {
  if (dtype == Format::F32) {
    std::memcpy(target + index * 4, &value, 4);
    return;
  }
  const uint16_t bits = dtype == Format::F16 ? f16_from_float(value) : bf16_from_float(value);
  std::memcpy(target + index * 2, &bits, 2);
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

// One kv head of one tile: walks the pages, each widened once for all rows and query heads.
class TileAttention {
 public:
  TileAttention(const KvPool& pool, int32_t layer, int32_t kv_head, const float* q,
                int32_t num_heads, float scale, const StepRows& rows, RowTile tile)
      : shape_(pool.shape()),
        table_(kernels()),
        pool_(pool),
        layer_(layer),
        kv_head_(kv_head),
        q_(q),
        num_heads_(num_heads),
        heads_per_kv_(num_heads / shape_.num_kv_heads),
        scale_(scale),
        rows_(rows),
        tile_(tile),
        states_(int64_t{tile.end - tile.begin} * heads_per_kv_ * state_stride()),
        page_(2 * int64_t{shape_.head_dim} * shape_.page_tokens) {}

  void run(float* out) {
    int32_t last = 0;
    for (int32_t row = tile_.begin; row < tile_.end; ++row) {
      last = std::max(last, rows_.positions[row]);
    }
    for (int32_t p = 0; p <= last / shape_.page_tokens; ++p) attend(p, last);
    for (int32_t row = tile_.begin; row < tile_.end; ++row) {
      for (int32_t h = 0; h < heads_per_kv_; ++h) {
        const float* s = state(row, h);
        table_.divide(s + 2, s[1], shape_.head_dim, out + head_offset(row, h));
      }
    }
  }

 private:
  int64_t state_stride() const { return 2 + shape_.head_dim; }
  int64_t head_offset(int32_t row, int32_t h) const {
    return (int64_t{row} * num_heads_ + kv_head_ * heads_per_kv_ + h) * shape_.head_dim;
  }
  // Maximum, sum, accumulator.
  float* state(int32_t row, int32_t h) const {
    return states_.get() + (int64_t{row - tile_.begin} * heads_per_kv_ + h) * state_stride();
  }

  void attend(int32_t p, int32_t last) {
    const int32_t page =
        rows_.page_table[int64_t{rows_.sequences[tile_.begin]} * rows_.max_pages + p];
    const int32_t used = std::min(last - p * shape_.page_tokens + 1, shape_.page_tokens);
    const PageArgs args{widened_keys(page),
                        widened_values(page, used),
                        shape_.head_dim,
                        shape_.page_tokens,
                        scale_,
                        p == 0};
    queries_.clear();
    for (int32_t row = tile_.begin; row < tile_.end; ++row) {
      const int32_t visible = rows_.positions[row] - p * shape_.page_tokens + 1;
      if (visible <= 0) continue;
      for (int32_t h = 0; h < heads_per_kv_; ++h) {
        float* s = state(row, h);
        queries_.push_back(
            {q_ + head_offset(row, h), std::min(visible, shape_.page_tokens), s, s + 1, s + 2});
      }
    }
    table_.attend_page(args, queries_.data(), static_cast<int32_t>(queries_.size()));
  }

  // Lanes of keys beyond `used` hold whatever the page holds; their scores are never looked at.
  const float* widened_keys(int32_t page) {
    const std::byte* source = pool_.keys(page, layer_, kv_head_);
    if (shape_.dtype == Format::F32) return reinterpret_cast<const float*>(source);
    table_.widen(shape_.dtype, source, int64_t{shape_.head_dim} * shape_.page_tokens, page_.get());
    return page_.get();
  }

  const float* widened_values(int32_t page, int32_t used) {
    const std::byte* source = pool_.values(page, layer_, kv_head_);
    if (shape_.dtype == Format::F32) return reinterpret_cast<const float*>(source);
    float* values = page_.get() + int64_t{shape_.head_dim} * shape_.page_tokens;
    table_.widen(shape_.dtype, source, int64_t{shape_.head_dim} * used, values);
    return values;
  }

  const KvShape& shape_;
  const KernelTable& table_;
  const KvPool& pool_;
  int32_t layer_, kv_head_;
  const float* q_;
  int32_t num_heads_, heads_per_kv_;
  float scale_;
  const StepRows& rows_;
  RowTile tile_;
  std::vector<PageQuery> queries_;
  PoolBuffer<float> states_;
  PoolBuffer<float> page_;
};

}  // namespace

void check_kv_shape(const KvShape& s) {
  if (s.num_layers < 1 || s.num_pages < 1 || s.num_kv_heads < 1) {
    throw_shape("KVPool: layers, pages and kv heads must be at least 1");
  }
  if (s.head_dim < 1 || s.head_dim > kMaxHeadDim) {
    throw_shape("KVPool: head_dim out of range\nexpected 1 to " + std::to_string(kMaxHeadDim) +
                ", got " + std::to_string(s.head_dim));
  }
  if (s.page_tokens < 16 || s.page_tokens > kMaxPageTokens || s.page_tokens % 16 != 0) {
    throw_shape("KVPool: page_tokens must be a multiple of 16, at most " +
                std::to_string(kMaxPageTokens) + ", got " + std::to_string(s.page_tokens));
  }
  if (is_quantised(s.dtype)) throw_shape("KVPool: dtype must be f16, bf16 or f32");
}

KvPool::KvPool(const KvShape& shape, std::shared_ptr<std::byte> memory)
    : shape_(shape), memory_(std::move(memory)) {
  check_kv_shape(shape);
}

std::byte* KvPool::keys(int32_t page, int32_t layer, int32_t kv_head) const {
  const int64_t per_head = int64_t{shape_.head_dim} * shape_.page_tokens;
  const int64_t item = layer * 2 * shape_.half_items() + kv_head * per_head;
  return memory_.get() + page * shape_.page_bytes() + item * shape_.item_bytes();
}

std::byte* KvPool::values(int32_t page, int32_t layer, int32_t kv_head) const {
  return keys(page, layer, kv_head) + shape_.half_items() * shape_.item_bytes();
}

void check_step_rows(const KvPool& pool, const StepRows& rows, const char* op) {
  for (int32_t row = 0; row < rows.num_rows; ++row) {
    const int32_t position = rows.positions[row];
    const int32_t sequence = rows.sequences[row];
    const std::string where = std::string(op) + ": row " + std::to_string(row);
    if (sequence < 0 || sequence >= rows.num_sequences) {
      throw_shape(where + " has sequence " + std::to_string(sequence) + " of " +
                  std::to_string(rows.num_sequences));
    }
    if (position < 0 || position / pool.shape().page_tokens >= rows.max_pages) {
      throw_shape(where + " has position " + std::to_string(position) + ", beyond its " +
                  std::to_string(rows.max_pages) + " pages");
    }
    const int32_t* pages = rows.page_table + int64_t{sequence} * rows.max_pages;
    for (int32_t p = 0; p <= position / pool.shape().page_tokens; ++p) {
      if (pages[p] < 0 || pages[p] >= pool.shape().num_pages) {
        throw_shape(where + " needs page " + std::to_string(pages[p]) + " of " +
                    std::to_string(pool.shape().num_pages));
      }
    }
  }
}

void kv_write(ThreadPool& threads, const KvPool& pool, int32_t layer, const float* k,
              const float* v, const StepRows& rows) {
  const KvShape& s = pool.shape();
  threads.run_ranges(int64_t{rows.num_rows} * s.num_kv_heads, 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / s.num_kv_heads;
      const int32_t kv_head = static_cast<int32_t>(i % s.num_kv_heads);
      const int32_t position = rows.positions[row];
      const int32_t slot = position % s.page_tokens;
      const int32_t page =
          rows.page_table[int64_t{rows.sequences[row]} * rows.max_pages + position / s.page_tokens];
      std::byte* keys = pool.keys(page, layer, kv_head);
      std::byte* values = pool.values(page, layer, kv_head);
      for (int64_t d = 0; d < s.head_dim; ++d) {
        put(keys, s.dtype, d * s.page_tokens + slot, k[i * s.head_dim + d]);
        put(values, s.dtype, int64_t{slot} * s.head_dim + d, v[i * s.head_dim + d]);
      }
    }
  });
}

void paged_attention(ThreadPool& threads, const KvPool& pool, int32_t layer, const float* q,
                     int32_t num_heads, float scale, const StepRows& rows, float* out) {
  const std::vector<RowTile> tiles = tiles_of(rows);
  const int32_t kv_heads = pool.shape().num_kv_heads;
  threads.run(static_cast<int64_t>(tiles.size()) * kv_heads, [&](int64_t i) {
    const RowTile tile = tiles[static_cast<size_t>(i / kv_heads)];
    const int32_t kv_head = static_cast<int32_t>(i % kv_heads);
    TileAttention(pool, layer, kv_head, q, num_heads, scale, rows, tile).run(out);
  });
}

}  // namespace headrace
