// Where a product's rows come from and where its outputs go.
#pragma once

#include <cstdint>

#include "kernels/kernel_table.h"
#include "kernels/unroll.h"

namespace headrace::HEADRACE_ISA {

inline int32_t in_row(const LinearArgs& a, int32_t r) { return a.in_rows ? a.in_rows[r] : r; }
inline int32_t out_row(const LinearArgs& a, int32_t r) { return a.out_rows ? a.out_rows[r] : r; }

inline void store_outputs(const LinearArgs& a, int32_t block, int32_t row, Floats acc) {
  float* out = a.out + out_row(a, row) * a.out_stride + int64_t{block} * kBlockOutputs;
  const int32_t left = a.num_outputs - block * kBlockOutputs;
  if (left >= kBlockOutputs) {
    store(out, acc);
  } else {
    store_part(out, acc, left);
  }
}

inline Floats load_f32(const unsigned char* p) { return load(reinterpret_cast<const float*>(p)); }

// Where the packed weights of a block begin.
inline const unsigned char* block_start(const LinearArgs& a, int32_t block) {
  return reinterpret_cast<const unsigned char*>(a.weights) + int64_t{block} * a.block_bytes;
}

// Inputs of R quantised rows from `row` on, and what their products add to.
template <int R>
[[gnu::always_inline]] inline void start_rows(const LinearArgs& a, int32_t row, int32_t group,
                                              const int8_t* (&x)[R], const float* (&sx)[R],
                                              const int32_t* (&sums)[R], Floats (&acc)[R]) {
  unroll<R>([&](auto r) __attribute__((always_inline)) {
    const int64_t from = in_row(a, row + r);
    x[r] = a.codes + from * a.num_groups * group;
    sx[r] = a.scales + from * a.num_groups;
    sums[r] = a.sums + from * a.num_groups;
    acc[r] = splat(0.0f);
  });
}

// The same of one row, for B blocks `stride` apart from `block` on, and where their weights begin.
template <int B>
[[gnu::always_inline]] inline void start_blocks(const LinearArgs& a, int32_t block, int32_t stride,
                                                int32_t row, int32_t group, const int8_t* (&x)[1],
                                                const float* (&sx)[1], const int32_t* (&sums)[1],
                                                Floats (&acc)[B][1], const unsigned char* (&p)[B]) {
  unroll<B>([&](auto b) __attribute__((always_inline)) {
    start_rows(a, row, group, x, sx, sums, acc[b]);
    p[b] = block_start(a, block + b * stride);
  });
}

// One row's part of a call: tile(Index<B>, block, stride) for B blocks that many apart, until all
// had their turn. A core then reads several streams, and waits for memory at several places at
// once.
template <class Tile>
void blocks_apart(int32_t num_blocks, Tile&& tile) {
  const int32_t stride = num_blocks / kStreams;
  for (int32_t block = 0; block < stride; ++block) tile(Index<kStreams>{}, block, stride);
  for (int32_t block = stride * kStreams; block < num_blocks; ++block) tile(Index<1>{}, block, 0);
}

// Adds the minimums of group g to R rows: each weighs the sum of the row's inputs.
template <int R>
[[gnu::always_inline]] inline void add_minimums(Floats (&acc)[R], const int32_t* (&sums)[R],
                                                const float* (&sx)[R], int32_t g, Floats mw) {
  unroll<R>([&](auto r) __attribute__((always_inline)) {
    const Floats sum = to_float(splat_int(sums[r][g]));
    acc[r] = fma(sum, mul(splat(sx[r][g]), mw), acc[r]);
  });
}

}  // namespace headrace::HEADRACE_ISA
