#include "kernels/rotary_attention.h"

#include "base/array_pool.h"
#include "kernels/kernel_table.h"

namespace headrace {
namespace {

// x [T, heads, Dh] -> out: each head normed, if there is a weight, then turned.
void norm_and_turn(ThreadPool& threads, const Projections& in, const float* x, const float* norm,
                   int64_t num_rows, int64_t num_heads, int32_t head_dim, float* out) {
  const KernelTable& table = kernels();
  threads.run_ranges(num_rows * num_heads, 256, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const float* head = x + i * head_dim;
      float* turned = out + i * head_dim;
      if (norm != nullptr) {
        table.rms_norm_row(head, norm, in.eps, head_dim, turned);
        head = turned;
      }
      const int64_t angles = i / num_heads * in.half;
      table.rope_head(head, in.cos + angles, in.sin + angles, in.half, head_dim, turned);
    }
  });
}

}  // namespace

void rotary_attention(ThreadPool& threads, const KvPool& pool, int32_t layer, const Projections& in,
                      const AttentionParams& params, const StepRows& rows, float* out) {
  const int32_t head_dim = pool.shape().head_dim;
  const int32_t num_kv_heads = pool.shape().num_kv_heads;
  PoolBuffer<float> q(int64_t{rows.num_rows} * in.num_heads * head_dim);
  PoolBuffer<float> k(int64_t{rows.num_rows} * num_kv_heads * head_dim);
  norm_and_turn(threads, in, in.q, in.q_norm, rows.num_rows, in.num_heads, head_dim, q.get());
  norm_and_turn(threads, in, in.k, in.k_norm, rows.num_rows, num_kv_heads, head_dim, k.get());
  kv_write(threads, pool, layer, k.get(), in.v, rows);
  paged_attention(threads, pool, layer, q.get(), in.num_heads, params, rows, out);
}

}  // namespace headrace
