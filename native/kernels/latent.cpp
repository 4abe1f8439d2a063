#include "kernels/latent.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/array_pool.h"
#include "base/error.h"
#include "kernels/attention_table.h"
#include "kernels/attention_walk.h"
#include "kernels/kernel_table.h"
#include "kernels/kv_items.h"

namespace headrace {
namespace {

// A walk is one row and up to kLatentHeads of its heads.
class LatentWalks {
 public:
  LatentWalks(const LatentPool& pool, int32_t layer, const float* q, int32_t num_heads,
              const AttentionParams& params, const StepRows& rows, float* out)
      : shape_(pool.shape()),
        table_(kernels().attention),
        pool_(pool),
        layer_(layer),
        q_(q),
        num_heads_(num_heads),
        walks_per_row_((num_heads + kLatentHeads - 1) / kLatentHeads),
        params_(params),
        rows_(rows),
        out_(out) {}

  int64_t count() const { return int64_t{rows_.num_rows} * walks_per_row_; }
  int32_t num_states() const { return kLatentHeads; }
  int32_t width() const { return shape_.latent_dim; }

  PageRange pages(int64_t walk) const {
    const int32_t position = rows_.positions[row_of(walk)];
    return {params_.first_seen(position) / shape_.page_tokens, position / shape_.page_tokens + 1};
  }

  void attend(int64_t walk, PageRange range, float* states, int64_t page_stride) const {
    const PoolBuffer<float> queries(int64_t{shape_.width()} * kLatentHeads);
    const PoolBuffer<float> scratch(latent_scratch(shape_.width(), shape_.page_tokens));
    pack_queries(walk, queries.get());
    const int32_t position = rows_.positions[row_of(walk)];
    const int32_t* page_of = rows_.pages(row_of(walk));
    for (int32_t p = range.begin; p < range.end; ++p) {
      const int32_t before = p * shape_.page_tokens;
      const LatentArgs page{pool_.latents(page_of[p], layer_),
                            p + 1 < range.end ? pool_.latents(page_of[p + 1], layer_) : nullptr,
                            shape_.width(),
                            shape_.latent_dim,
                            shape_.page_tokens,
                            params_.scale,
                            std::max(params_.first_seen(position) - before, 0),
                            std::min(position + 1 - before, shape_.page_tokens),
                            heads_of(walk),
                            queries.get(),
                            scratch.get(),
                            states + (p - range.begin) * page_stride};
      table_.attend_latents[static_cast<int32_t>(shape_.dtype)](page);
    }
  }

  void finish(int64_t walk, const float* states) const {
    for (int32_t h = 0; h < heads_of(walk); ++h) {
      const int32_t head = first_head(walk) + h;
      table_.finish_state(states + h * int64_t{state_stride(shape_.latent_dim)}, shape_.latent_dim,
                          params_.sinks == nullptr ? nullptr : params_.sinks + head,
                          out_ + (int64_t{row_of(walk)} * num_heads_ + head) * shape_.latent_dim);
    }
  }

 private:
  int32_t row_of(int64_t walk) const { return static_cast<int32_t>(walk / walks_per_row_); }
  int32_t first_head(int64_t walk) const {
    return static_cast<int32_t>(walk % walks_per_row_) * kLatentHeads;
  }
  int32_t heads_of(int64_t walk) const {
    return std::min(kLatentHeads, num_heads_ - first_head(walk));
  }

  void pack_queries(int64_t walk, float* packed) const {
    const float* q = q_ + (int64_t{row_of(walk)} * num_heads_ + first_head(walk)) * shape_.width();
    std::fill_n(packed, int64_t{shape_.width()} * kLatentHeads, 0.0f);
    for (int64_t h = 0; h < heads_of(walk); ++h) {
      for (int64_t d = 0; d < shape_.width(); ++d) {
        packed[d * kLatentHeads + h] = q[h * shape_.width() + d];
      }
    }
  }

  const LatentShape& shape_;
  const AttentionTable& table_;
  const LatentPool& pool_;
  int32_t layer_;
  const float* q_;
  int32_t num_heads_, walks_per_row_;
  const AttentionParams& params_;
  const StepRows& rows_;
  float* out_;
};

}  // namespace

void check_latent_shape(const LatentShape& s) {
  if (s.num_layers < 1 || s.num_pages < 1 || s.latent_dim < 1 || s.rope_dim < 0) {
    throw Error(ErrorKind::Shape, "LatentPool: layers, pages and latent_dim must be at least 1");
  }
  if (s.width() > kMaxLatentWidth) {
    throw Error(ErrorKind::Shape,
                "LatentPool: latent_dim + rope_dim out of range\nexpected at most " +
                    std::to_string(kMaxLatentWidth) + ", got " + std::to_string(s.width()));
  }
  check_kv_page("LatentPool", s.dtype, s.page_tokens);
}

LatentPool::LatentPool(const LatentShape& shape, std::shared_ptr<std::byte> memory)
    : shape_(shape), memory_(std::move(memory)) {
  check_latent_shape(shape);
}

void latent_write(ThreadPool& threads, const LatentPool& pool, int32_t layer, const float* latents,
                  const StepRows& rows) {
  const LatentShape& s = pool.shape();
  threads.run_ranges(rows.num_rows, 16, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const auto row = static_cast<int32_t>(i);
      const int64_t slot = rows.positions[row] % s.page_tokens;
      std::byte* page = pool.latents(rows.pages(row)[rows.positions[row] / s.page_tokens], layer);
      const int64_t token_bytes = s.width() * kv_item_bytes(s.dtype);
      put_items(s.dtype, latents + i * s.width(), s.width(),
                {page + slot * token_bytes, page + s.page_tokens * token_bytes + slot * 2, 1,
                 s.page_tokens});
    }
  });
}

void latent_attention(ThreadPool& threads, const LatentPool& pool, int32_t layer, const float* q,
                      int32_t num_heads, const AttentionParams& params, const StepRows& rows,
                      float* out) {
  const LatentWalks walks(pool, layer, q, num_heads, params, rows, out);
  WalkRunner<LatentWalks>(threads, walks).run();
}

}  // namespace headrace
