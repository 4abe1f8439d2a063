// The serial inner kernels of one instruction set. Every table computes the same real numbers in
// the same order (the numeric contract), so which one runs never changes a bit.
//
// A new instruction set is one file beside kernels_avx2.cpp, which fills a KernelTable and joins
// kernel_table() and Isa.
#pragma once

#include <cstdint>

#include "base/cpu.h"
#include "base/record_feed.h"
#include "kernels/attention_table.h"
#include "kernels/format.h"
#include "kernels/quantise_table.h"

namespace headrace {

// out[out_rows[r]][o] = sum over k of in[in_rows[r]][k] * W[o][k] for the outputs of some blocks.
struct LinearArgs {
  const std::byte* weights;  // the first block
  int64_t block_bytes;
  int32_t num_blocks;
  int32_t num_outputs;  // of these blocks together; only the last may be partial
  int32_t cols;
  int32_t group;
  int32_t num_groups;

  // Floating formats read x; quantised ones read codes, scales and sums (of codes, per group).
  const float* x;       // row stride cols
  const int8_t* codes;  // row stride num_groups * group
  const float* scales;  // row stride num_groups
  const int32_t* sums;  // row stride num_groups

  int32_t num_rows;
  const int32_t* in_rows;   // null: 0, 1, 2, ...
  const int32_t* out_rows;  // null: 0, 1, 2, ...
  float* out;               // the first block's first output of row 0
  int64_t out_stride;
};

// A group whose largest magnitude is below this counts as zero: 127 / amax would overflow.
inline constexpr float kLeastAmax = 1e-36f;

struct KernelTable {
  void (*linear[kNumFormats])(const LinearArgs& args);  // by Format

  // Per group: scale = amax/127, codes, sum of codes. False if x holds a NaN or an infinity.
  bool (*quantise_row)(const float* x, int32_t cols, int32_t group, int8_t* codes, float* scales,
                       int32_t* sums);

  void (*rms_norm_row)(const float* x, const float* weight, float eps, int32_t count, float* out);
  void (*silu_mul)(const float* gate, const float* up, int64_t count, float* out);
  void (*add)(const float* x, const float* y, int64_t count, float* out);
  void (*clamp)(const float* x, float limit, int64_t count, float* out);
  void (*fma_row)(float weight, const float* y, int64_t count,
                  float* out);  // out = fma(weight, y, out)
  float (*max_of)(const float* x, int64_t count);
  bool (*has_nan)(const float* x, int64_t count);
  // out = exp((x - maximum) / temperature); returns the sum in tree order.
  float (*exp_sum)(const float* x, float maximum, float temperature, int64_t count, float* out);
  void (*divide)(const float* x, float divisor, int64_t count, float* out);

  // First rotary dims of one head: pairs (i, i + half) turned by cos[i], sin[i]; the rest copied.
  void (*rope_head)(const float* x, const float* cos, const float* sin, int32_t half,
                    int32_t head_dim, float* out);

  void (*widen)(Format dtype, const void* source, int64_t count, float* out);
  // Each nibble becomes its entry of a table of sixteen; `count` is a multiple of 64.
  void (*look_up)(const int8_t* table, int64_t count, uint8_t* codes);
  // Reads every byte and folds it into one word: the speed of memory itself, for benchmarks.
  uint32_t (*read_bytes)(const void* data, int64_t num_bytes);
  // Operations on registers alone, also for benchmarks; return how many (a multiply-add is two).
  // The sink holds sixteen numbers, of which the first is read, and takes a result.
  int64_t (*peak_float)(int64_t rounds, float* sink);
  int64_t (*peak_int8)(int64_t rounds, int32_t* sink);

  AttentionTable attention;
  QuantiseTable quantise;
};

const KernelTable& kernel_table(Isa isa);

// The table in use: the best this processor has until set_isa chooses another.
const KernelTable& kernels();
Isa current_isa();
void set_isa(Isa isa);

// Defined by the instruction sets' own files; null where the compiler targets another processor.
const KernelTable* scalar_table();
const KernelTable* avx2_table();
const KernelTable* avx_vnni_table();
const KernelTable* avx512_table();
const KernelTable* amx_table();
const KernelTable* neon_table();
const KernelTable* neon_i8mm_table();

}  // namespace headrace
