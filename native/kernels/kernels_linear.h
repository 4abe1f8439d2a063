// Products with packed matrices, written once over the instruction set's lanes and dots. A tile is
// one block of 16 outputs by R rows: the weights are unpacked once for all rows of the tile.
#pragma once

#include <cstdint>

#include "kernels/kernel_table.h"
#include "kernels/linear_rows.h"
#include "kernels/unroll.h"

namespace headrace::HEADRACE_ISA {

// Two KiB ahead, tier 0: worth 15-20 % of read bandwidth per core where tried; far or non-temporal
// prefetches lost.
inline constexpr int64_t kPrefetchBytes = 2048;

struct Q8 {
  static constexpr int kOffset = kQ8Offset;
  static constexpr int kCodesPerByte = 1;
  static Bytes weights(Bytes codes) { return q8_weights(codes); }
  static Ints dot(Ints acc, Bytes w, const int8_t* quad) { return dot_q8(acc, w, quad); }
  static Floats scales(const unsigned char* p) { return load_f16(p); }
  static constexpr int kScaleBytes = 32;
};

struct Q4 {
  static constexpr int kOffset = 8;
  static constexpr int kCodesPerByte = 2;
  static Bytes weights(Bytes nibbles) { return nibbles; }
  static Ints dot(Ints acc, Bytes w, const int8_t* quad) { return dot_small(acc, w, quad); }
  static Floats scales(const unsigned char* p) { return load_f16(p); }
  static constexpr int kScaleBytes = 32;
};

struct Mxfp4 {
  static constexpr int kOffset = kMxfp4Offset;
  static constexpr int kCodesPerByte = 2;
  static Bytes weights(Bytes nibbles) { return mxfp4_weights(nibbles); }
  static Ints dot(Ints acc, Bytes w, const int8_t* quad) { return dot_small(acc, w, quad); }
  static Floats scales(const unsigned char* p) { return half_e8m0(p); }
  static constexpr int kScaleBytes = 16;
};

template <class F, int group, int R>
void quantised_tile(const LinearArgs& a, int32_t block, int32_t row) {
  const int8_t* x[R];
  const float* sx[R];
  const int32_t* sums[R];
  Floats acc[R];
  unroll<R>([&](auto r) {
    const int64_t from = in_row(a, row + r);
    x[r] = a.codes + from * a.num_groups * group;
    sx[r] = a.scales + from * a.num_groups;
    sums[r] = a.sums + from * a.num_groups;
    acc[r] = splat(0.0f);
  });
  const unsigned char* p =
      reinterpret_cast<const unsigned char*>(a.weights) + int64_t{block} * a.block_bytes;
  constexpr int kVectors = group / 4 / F::kCodesPerByte;
  for (int32_t g = 0; g < a.num_groups; ++g) {
    Ints dot[R];
    unroll<R>([&](auto r) { dot[r] = splat_int(-F::kOffset * sums[r][g]); });
    for (int j = 0; j < kVectors; ++j) {
      prefetch(p + j * 64 + kPrefetchBytes);
      const Bytes packed = load_bytes(p + j * 64);
      if constexpr (F::kCodesPerByte == 1) {
        const Bytes w = F::weights(packed);
        unroll<R>([&](auto r) { dot[r] = F::dot(dot[r], w, x[r] + j * 4); });
      } else {
        const Bytes low = F::weights(low_nibbles(packed));
        const Bytes high = F::weights(high_nibbles(packed));
        unroll<R>([&](auto r) { dot[r] = F::dot(dot[r], low, x[r] + j * 8); });
        unroll<R>([&](auto r) { dot[r] = F::dot(dot[r], high, x[r] + j * 8 + 4); });
      }
    }
    const Floats sw = F::scales(p + kVectors * 64);
    unroll<R>([&](auto r) {
      acc[r] = fma(to_float(dot[r]), mul(splat(sx[r][g]), sw), acc[r]);
      x[r] += group;
    });
    p += kVectors * 64 + F::kScaleBytes;
  }
  unroll<R>([&](auto r) { store_outputs(a, block, row + r, acc[r]); });
}

// The last rows of a call, at most R.
template <class F, int group, int R>
void quantised_rest(const LinearArgs& a, int32_t block, int32_t row) {
  if constexpr (R > 0) {
    if (a.num_rows - row == R) {
      quantised_tile<F, group, R>(a, block, row);
    } else {
      quantised_rest<F, group, R - 1>(a, block, row);
    }
  }
}

template <class F, int group>
void quantised_blocks(const LinearArgs& a) {
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
inline void linear_q4(const LinearArgs& a) {
  if (a.group == 64) {
    quantised_blocks<Q4, 64>(a);
  } else {
    quantised_blocks<Q4, 32>(a);
  }
}

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
  for (; row + 4 <= a.num_rows; row += 4) float_tile<W, B, 4>(a, block, row);
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

// ---- the table

inline const KernelTable* make_table() {
  static constexpr KernelTable table = {
      {linear_f32, linear_f16, linear_bf16, linear_q8, linear_q4, linear_mxfp4},
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
      read_bytes,
      peak_float,
      peak_int8,
      attention_table,
      quantise_table,
  };
  return &table;
}

}  // namespace headrace::HEADRACE_ISA
