// Products with packed matrices, written once over the instruction set's lanes and dots. A tile is
// one block of 16 outputs by R rows: the weights are unpacked once for all rows of the tile.
#pragma once

#include <cstdint>

#include "kernels/kernel_table.h"
#include "kernels/kernels_linear_super.h"
#include "kernels/linear_rows.h"
#include "kernels/unroll.h"

namespace headrace::HEADRACE_ISA {

// Two KiB ahead, tier 0: worth 15-20 % of read bandwidth per core where tried; far or non-temporal
// prefetches lost.
inline constexpr int64_t kPrefetchBytes = 2048;
// The same for one row, of which a core may read several streams.
inline constexpr int64_t kRowPrefetchBytes = 1536;

// A format: how its bytes become weights, and what follows them in a group. `kOffset` is what
// weights have too much, so that a dot begins at minus that many sums of inputs.
struct Q8 {
  static constexpr int kOffset = kQ8Offset;
  static constexpr int kCodesPerByte = 1;
  static Bytes weights(Bytes codes) { return q8_weights(codes); }
  using Run = WideRun<Ints, dot_q8, 1>;
  static Floats scales(const unsigned char* p) { return load_f16(p); }
  static constexpr int kScaleBytes = 32;
  static constexpr bool kHasMinimum = false;
};

struct Q4 {
  static constexpr int kOffset = 8;
  static constexpr int kCodesPerByte = 2;
  static Bytes weights(Bytes nibbles) { return nibbles; }
  // Those of the high nibbles, times 1 << kRaised.
  static constexpr int kRaised = kHighShift;
  static Bytes raised_weights(Bytes packed) { return raised_high_nibbles(packed); }
  using Run = SmallRun<15>;
  static Floats scales(const unsigned char* p) { return load_f16(p); }
  static constexpr int kScaleBytes = 32;
  static constexpr bool kHasMinimum = false;
};

struct Mxfp4 {
  static constexpr int kOffset = kMxfp4Offset;
  static constexpr int kCodesPerByte = 2;
  static Bytes weights(Bytes nibbles) { return mxfp4_weights(nibbles); }
  static constexpr int kRaised = 0;
  static Bytes raised_weights(Bytes packed) { return mxfp4_weights(high_nibbles(packed)); }
  using Run = SmallRun<24>;
  static Floats scales(const unsigned char* p) { return half_e8m0(p); }
  static constexpr int kScaleBytes = 16;
  static constexpr bool kHasMinimum = false;
};

struct Q8f : Q8 {
  static Floats scales(const unsigned char* p) { return load_f32(p); }
  static constexpr int kScaleBytes = 64;
};

struct Q8a : Q8 {
  static Floats scales(const unsigned char* p) { return load_f32(p); }
  static constexpr int kScaleBytes = 128;  // with the minimums, which come second
  static constexpr bool kHasMinimum = true;
};

struct Q4f : Q4 {
  static Floats scales(const unsigned char* p) { return load_f32(p); }
  static constexpr int kScaleBytes = 64;
};

struct Q4a : Q4 {
  static constexpr int kOffset = 0;
  static Floats scales(const unsigned char* p) { return load_f32(p); }
  static constexpr int kScaleBytes = 128;
  static constexpr bool kHasMinimum = true;
};

// The dots of one row with a group of B blocks, `begin` added to each.
template <class F, int group, int B>
[[gnu::always_inline]] inline void group_dots(const unsigned char* const (&p)[B], const int8_t* x,
                                              Ints begin, Ints (&dot)[B]) {
  constexpr int kVectors = group / 4 / F::kCodesPerByte;
  using Run = typename F::Run;
  static_assert(!Run::kNarrow || kVectors <= Run::kQuads);
  Run low[B], high[B];
  unroll<B>([&](auto b) {
    low[b].start(begin);
    high[b].start(splat_int(0));
  });
  unroll<kVectors>([&](auto j) __attribute__((always_inline)) {
    unroll<B>([&](auto b) __attribute__((always_inline)) {
      prefetch(p[b] + j * 64 + kRowPrefetchBytes);
      const Bytes packed = load_bytes(p[b] + j * 64);
      if constexpr (F::kCodesPerByte == 1) {
        low[b].add(F::weights(packed), x + j * 4);
      } else {
        low[b].add(F::weights(low_nibbles(packed)), x + j * 8);
        high[b].add(F::raised_weights(packed), x + j * 8 + 4);
      }
    });
  });
  unroll<B>([&](auto b) {
    dot[b] = low[b].sum(begin);
    if constexpr (F::kCodesPerByte == 2) {
      dot[b] = add(dot[b], shift_right<F::kRaised>(high[b].sum(splat_int(0))));
    }
  });
}

// One row by B blocks, `stride` apart.
template <class F, int group, int B>
void one_row_tile(const LinearArgs& a, int32_t block, int32_t stride, int32_t row) {
  const int8_t* x[1];
  const float* sx[1];
  const int32_t* sums[1];
  Floats acc[B][1];
  const unsigned char* p[B];
  start_blocks(a, block, stride, row, group, x, sx, sums, acc, p);
  constexpr int kCodeBytes = group * kBlockOutputs / F::kCodesPerByte;
  for (int32_t g = 0; g < a.num_groups; ++g) {
    const Ints begin = splat_int(-F::kOffset * sums[0][g]);
    Ints dot[B];
    group_dots<F, group>(p, x[0], begin, dot);
    unroll<B>([&](auto b) __attribute__((always_inline)) {
      const Floats sw = F::scales(p[b] + kCodeBytes);
      acc[b][0] = fma(to_float(dot[b]), mul(splat(sx[0][g]), sw), acc[b][0]);
      if constexpr (F::kHasMinimum) {
        add_minimums(acc[b], sums, sx, g, load_f32(p[b] + kCodeBytes + 64));
      }
      p[b] += kCodeBytes + F::kScaleBytes;
    });
    x[0] += group;
  }
  unroll<B>([&](auto b) { store_outputs(a, block + b * stride, row, acc[b][0]); });
}

template <class F, int group, int R>
void quantised_tile(const LinearArgs& a, int32_t block, int32_t row) {
  const int8_t* x[R];
  const float* sx[R];
  const int32_t* sums[R];
  Floats acc[R];
  start_rows(a, row, group, x, sx, sums, acc);
  const unsigned char* p = block_start(a, block);
  constexpr int kVectors = group / 4 / F::kCodesPerByte;
  using Run = typename F::Run;
  constexpr int kRunVectors = kRunQuads<Run, group / 4> / F::kCodesPerByte;
  for (int32_t g = 0; g < a.num_groups; ++g) {
    Ints dot[R];
    unroll<R>([&](auto r) { dot[r] = splat_int(-F::kOffset * sums[r][g]); });
    for (int from = 0; from < kVectors; from += kRunVectors) {
      Run run[R];
      unroll<R>([&](auto r) { run[r].start(dot[r]); });
      unroll<kRunVectors>([&](auto i) __attribute__((always_inline)) {
        const int j = from + i;
        prefetch(p + j * 64 + kPrefetchBytes);
        const Bytes packed = load_bytes(p + j * 64);
        if constexpr (F::kCodesPerByte == 1) {
          const Bytes w = F::weights(packed);
          unroll<R>([&](auto r) { run[r].add(w, x[r] + j * 4); });
        } else {
          const Bytes low = F::weights(low_nibbles(packed));
          const Bytes high = F::weights(high_nibbles(packed));
          unroll<R>([&](auto r) { run[r].add(low, x[r] + j * 8); });
          unroll<R>([&](auto r) { run[r].add(high, x[r] + j * 8 + 4); });
        }
      });
      unroll<R>([&](auto r) { dot[r] = run[r].sum(dot[r]); });
    }
    const Floats sw = F::scales(p + kVectors * 64);
    unroll<R>([&](auto r) {
      acc[r] = fma(to_float(dot[r]), mul(splat(sx[r][g]), sw), acc[r]);
      x[r] += group;
    });
    if constexpr (F::kHasMinimum) {
      add_minimums(acc, sums, sx, g, load_f32(p + kVectors * 64 + 64));
    }
    p += kVectors * 64 + F::kScaleBytes;
  }
  unroll<R>([&](auto r) { store_outputs(a, block, row + r, acc[r]); });
}

// The last rows of a call, at most R.
template <class F, int group, int R>
void quantised_rest(const LinearArgs& a, int32_t block, int32_t row) {
  if constexpr (R == 1) {
    if (row < a.num_rows) one_row_tile<F, group, 1>(a, block, 0, row);
  } else {
    if (a.num_rows - row == R) {
      quantised_tile<F, group, R>(a, block, row);
    } else {
      quantised_rest<F, group, R - 1>(a, block, row);
    }
  }
}

template <class F, int group>
void quantised_blocks(const LinearArgs& a) {
  if (a.num_rows == 1) {
    blocks_apart(a.num_blocks, [&](auto streams, int32_t block, int32_t stride) {
      one_row_tile<F, group, streams>(a, block, stride, 0);
    });
    return;
  }
  for (int32_t block = 0; block < a.num_blocks; ++block) {
    int32_t row = 0;
    for (; row + kTileRowsMost <= a.num_rows; row += kTileRowsMost) {
      quantised_tile<F, group, kTileRowsMost>(a, block, row);
    }
    quantised_rest<F, group, kTileRowsMost - 1>(a, block, row);
  }
}

inline void linear_q8(const LinearArgs& a) { quantised_blocks<Q8, 32>(a); }
inline void linear_mxfp4(const LinearArgs& a) { quantised_blocks<Mxfp4, 32>(a); }

// Calls the product of a format that has two groups.
template <class F, int group, int other>
void quantised_groups(const LinearArgs& a) {
  if (a.group == other) {
    quantised_blocks<F, other>(a);
  } else {
    quantised_blocks<F, group>(a);
  }
}

inline void linear_q4(const LinearArgs& a) { quantised_groups<Q4, 32, 64>(a); }
inline void linear_q8f(const LinearArgs& a) { quantised_groups<Q8f, 32, 16>(a); }
inline void linear_q8a(const LinearArgs& a) { quantised_groups<Q8a, 32, 16>(a); }
inline void linear_q4f(const LinearArgs& a) { quantised_groups<Q4f, 32, 64>(a); }
inline void linear_q4a(const LinearArgs& a) { quantised_groups<Q4a, 32, 64>(a); }

// ---- floating formats: one chain over k per output, several blocks and rows in flight

struct F32Weights {
  static constexpr int kBytes = 64;
  static Floats load_weights(const unsigned char* p) {
    return load(reinterpret_cast<const float*>(p));
  }
};
struct F16Weights {
  static constexpr int kBytes = 32;
  static Floats load_weights(const unsigned char* p) { return load_f16(p); }
};
struct Bf16Weights {
  static constexpr int kBytes = 32;
  static Floats load_weights(const unsigned char* p) { return load_bf16(p); }
};

// Rows of a tile, and blocks of B that its accumulators leave room for.
constexpr int kFloatRows = 4;
template <int B>
inline constexpr int kFloatBlocks = B < kFloatTile / kFloatRows ? B : kFloatTile / kFloatRows;

template <class W, int B, int R>
void float_tile(const LinearArgs& a, int32_t block, int32_t row) {
  const unsigned char* w[B];
  const float* x[R];
  Floats acc[B][R];
  for (int b = 0; b < B; ++b) {
    w[b] = reinterpret_cast<const unsigned char*>(a.weights) + int64_t{block + b} * a.block_bytes;
    for (int r = 0; r < R; ++r) acc[b][r] = splat(0.0f);
  }
  for (int r = 0; r < R; ++r) x[r] = a.x + int64_t{in_row(a, row + r)} * a.cols;
  for (int32_t k = 0; k < a.cols; ++k) {
    Floats in[R];
    for (int r = 0; r < R; ++r) in[r] = splat(x[r][k]);
    for (int b = 0; b < B; ++b) {
      if (k % (64 / W::kBytes) == 0) prefetch(w[b] + kPrefetchBytes / 2);
      const Floats weights = W::load_weights(w[b]);
      w[b] += W::kBytes;
      for (int r = 0; r < R; ++r) acc[b][r] = fma(weights, in[r], acc[b][r]);
    }
  }
  for (int b = 0; b < B; ++b) {
    for (int r = 0; r < R; ++r) store_outputs(a, block + b, row + r, acc[b][r]);
  }
}

template <class W, int B>
void float_rows(const LinearArgs& a, int32_t block) {
  int32_t row = 0;
  for (; row + kFloatRows <= a.num_rows; row += kFloatRows) {
    for (int b = 0; b < B; b += kFloatBlocks<B>) {
      float_tile<W, kFloatBlocks<B>, kFloatRows>(a, block + b, row);
    }
  }
  for (; row < a.num_rows; ++row) float_tile<W, B, 1>(a, block, row);
}

template <class W>
void float_blocks(const LinearArgs& a) {
  int32_t block = 0;
  for (; block + 4 <= a.num_blocks; block += 4) float_rows<W, 4>(a, block);
  for (; block < a.num_blocks; ++block) float_rows<W, 1>(a, block);
}

inline void linear_f32(const LinearArgs& a) { float_blocks<F32Weights>(a); }
inline void linear_f16(const LinearArgs& a) { float_blocks<F16Weights>(a); }
inline void linear_bf16(const LinearArgs& a) { float_blocks<Bf16Weights>(a); }

// ---- f8: a floating format whose weights are made by a multiplication on the way

template <int B, int R>
void f8_tile(const LinearArgs& a, int32_t block, int32_t row) {
  const unsigned char* w[B];
  const float* x[R];
  Floats acc[B][R];
  for (int b = 0; b < B; ++b) {
    w[b] = reinterpret_cast<const unsigned char*>(a.weights) + int64_t{block + b} * a.block_bytes;
    for (int r = 0; r < R; ++r) acc[b][r] = splat(0.0f);
  }
  for (int r = 0; r < R; ++r) x[r] = a.x + int64_t{in_row(a, row + r)} * a.cols;
  for (int32_t from = 0; from < a.cols; from += a.group) {
    const int32_t count = a.cols - from < a.group ? a.cols - from : a.group;
    Floats scales[B];
    for (int b = 0; b < B; ++b) {
      scales[b] = mul(load_f32(w[b] + a.group * kBlockOutputs), splat(256.0f));
    }
    for (int32_t k = 0; k < count; ++k) {
      Floats in[R];
      for (int r = 0; r < R; ++r) in[r] = splat(x[r][from + k]);
      for (int b = 0; b < B; ++b) {
        const unsigned char* p = w[b] + k * kBlockOutputs;
        if (k % 4 == 0) prefetch(p + kPrefetchBytes / 2);
        const Floats weights = mul(load_e4m3(p), scales[b]);
        for (int r = 0; r < R; ++r) acc[b][r] = fma(weights, in[r], acc[b][r]);
      }
    }
    for (int b = 0; b < B; ++b) w[b] += a.group * kBlockOutputs + 64;
  }
  for (int b = 0; b < B; ++b) {
    for (int r = 0; r < R; ++r) store_outputs(a, block + b, row + r, acc[b][r]);
  }
}

template <int B>
void f8_rows(const LinearArgs& a, int32_t block) {
  int32_t row = 0;
  for (; row + kFloatRows <= a.num_rows; row += kFloatRows) {
    for (int b = 0; b < B; b += kFloatBlocks<B>) {
      f8_tile<kFloatBlocks<B>, kFloatRows>(a, block + b, row);
    }
  }
  for (; row < a.num_rows; ++row) f8_tile<B, 1>(a, block, row);
}

// Of many rows the weights of a group are made once and lie in the first cache, beside the sums of
// the rows.
constexpr int kF8GroupMost = 128;
constexpr int kPanelBlocks = kFloatTile < 16 ? 1 : 2;
constexpr int kPanelTile = kFloatTile / kPanelBlocks;  // rows
constexpr int kPanelRows = 32;
constexpr int kLeastPanelRows = 2 * kFloatRows;

template <int B>
struct F8Panel {
  alignas(64) float weights[B][kF8GroupMost][kBlockOutputs];
  alignas(64) float sums[kPanelRows][B][kBlockOutputs];
};

// R rows by the group's `count` inputs, which begin at `x` in the first row.
template <int B, int R>
void f8_panel_tile(F8Panel<B>& panel, const float* const* x, int32_t from, int32_t count,
                   int32_t row) {
  Floats acc[R * B];
  unroll<R * B>([&](int i) { acc[i] = load(panel.sums[row + i / B][i % B]); });
  for (int32_t k = 0; k < count; ++k) {
    Floats weights[B];
    unroll<B>([&](int b) { weights[b] = load(panel.weights[b][k]); });
    unroll<R>([&](int r) {
      const Floats in = splat(x[row + r][from + k]);
      unroll<B>([&](int b) { acc[r * B + b] = fma(weights[b], in, acc[r * B + b]); });
    });
  }
  unroll<R * B>([&](int i) { store(panel.sums[row + i / B][i % B], acc[i]); });
}

template <int B>
void f8_panel(const LinearArgs& a, int32_t block, int32_t first, int32_t rows) {
  F8Panel<B> panel;
  const float* x[kPanelRows];
  for (int32_t r = 0; r < rows; ++r) {
    x[r] = a.x + int64_t{in_row(a, first + r)} * a.cols;
    for (int b = 0; b < B; ++b) store(panel.sums[r][b], splat(0.0f));
  }
  const unsigned char* w =
      reinterpret_cast<const unsigned char*>(a.weights) + int64_t{block} * a.block_bytes;
  for (int32_t from = 0; from < a.cols; from += a.group) {
    const int32_t count = a.cols - from < a.group ? a.cols - from : a.group;
    for (int b = 0; b < B; ++b) {
      const unsigned char* p = w + b * int64_t{a.block_bytes};
      const Floats scale = mul(load_f32(p + a.group * kBlockOutputs), splat(256.0f));
      for (int32_t k = 0; k < count; ++k) {
        if (k % 4 == 0) prefetch(p + k * kBlockOutputs + kPrefetchBytes / 2);
        store(panel.weights[b][k], mul(load_e4m3(p + k * kBlockOutputs), scale));
      }
    }
    w += a.group * kBlockOutputs + 64;
    int32_t r = 0;
    for (; r + kPanelTile <= rows; r += kPanelTile) {
      f8_panel_tile<B, kPanelTile>(panel, x, from, count, r);
    }
    for (; r < rows; ++r) f8_panel_tile<B, 1>(panel, x, from, count, r);
  }
  for (int32_t r = 0; r < rows; ++r) {
    for (int b = 0; b < B; ++b) store_outputs(a, block + b, first + r, load(panel.sums[r][b]));
  }
}

// The blocks from `block` on, B at a time as long as there are so many.
template <int B>
int32_t f8_panels(const LinearArgs& a, int32_t block) {
  for (; block + B <= a.num_blocks; block += B) {
    for (int32_t row = 0; row < a.num_rows; row += kPanelRows) {
      const int32_t left = a.num_rows - row;
      f8_panel<B>(a, block, row, left < kPanelRows ? left : kPanelRows);
    }
  }
  return block;
}

inline void linear_f8(const LinearArgs& a) {
  int32_t block = 0;
  if (a.num_rows >= kLeastPanelRows) {
    f8_panels<1>(a, f8_panels<kPanelBlocks>(a, 0));
    return;
  }
  for (; block + 4 <= a.num_blocks; block += 4) f8_rows<4>(a, block);
  for (; block < a.num_blocks; ++block) f8_rows<1>(a, block);
}

// ---- the table

inline const KernelTable* make_table() {
  static constexpr KernelTable table = {
      {linear_f32, linear_f16, linear_bf16, linear_q8, linear_q4, linear_mxfp4, linear_q8f,
       linear_q8a, linear_q4f, linear_q4a, linear_f8, linear_q2k, linear_q3k, linear_q4k,
       linear_q5k, linear_q6k, linear_q6ka},
      quantise_row,
      rms_norm_row,
      silu_mul,
      add_row,
      clamp_row,
      fma_row,
      max_of,
      has_nan,
      exp_sum,
      divide_row,
      rope_head,
      widen,
      look_up_codes,
      read_bytes,
      peak_float,
      peak_int8,
      attention_table,
      quantise_table,
  };
  return &table;
}

}  // namespace headrace::HEADRACE_ISA
