// Latents in pages, and multi-head latent attention over them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/thread_pool.h"
#include "kernels/attention.h"
#include "kernels/format.h"

namespace headrace {

// The shape of a pool of latents. A page holds page_tokens tokens of one sequence in all layers:
//   [layer][page_tokens][latent_dim + rope_dim]
// One vector per token and layer serves all heads: the whole of it as the key, its first latent_dim
// values as the value. In q8 the codes are followed by f16 scales [groups][page_tokens].
struct LatentShape {
  int32_t num_layers, num_pages, latent_dim, rope_dim, page_tokens;
  Format dtype;  // F32, F16, BF16 or Q8

  int32_t width() const { return latent_dim + rope_dim; }
  int64_t layer_bytes() const { return kv_items_bytes(dtype, width(), page_tokens); }
  int64_t page_bytes() const { return num_layers * layer_bytes(); }
  int64_t nbytes() const { return num_pages * page_bytes(); }
};

void check_latent_shape(const LatentShape& shape);

class LatentPool {
 public:
  // As KvPool.
  LatentPool(const LatentShape& shape, std::shared_ptr<std::byte> memory);

  const LatentShape& shape() const { return shape_; }
  std::byte* latents(int32_t page, int32_t layer) const {
    return memory_.get() + page * shape_.page_bytes() + layer * shape_.layer_bytes();
  }

 private:
  LatentShape shape_;
  std::shared_ptr<std::byte> memory_;
};

// Rounds latents [T, latent_dim + rope_dim] to the pool's type and puts them at their rows'
// positions.
void latent_write(ThreadPool& threads, const LatentPool& pool, int32_t layer, const float* latents,
                  const StepRows& rows);

// q [T, heads, latent_dim + rope_dim] -> out [T, heads, latent_dim]. As paged_attention with one kv
// head whose values are the keys' first dims.
void latent_attention(ThreadPool& threads, const LatentPool& pool, int32_t layer, const float* q,
                      int32_t num_heads, const AttentionParams& params, const StepRows& rows,
                      float* out);

}  // namespace headrace
