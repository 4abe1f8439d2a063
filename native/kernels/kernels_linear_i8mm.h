// Quantised products of two rows or more by SMMLA, which multiplies 2 x 8 by 8 x 2 bytes: twice the
// products of one SDOT. A packed vector holds four inputs of an output together, SMMLA wants eight,
// so neighbouring vectors are zipped once per tile. One row is left to SDOT.
#pragma once

#include <cstdint>

#include "kernels/kernel_table.h"
#include "kernels/linear_rows.h"
#include "kernels/unroll.h"

namespace headrace::HEADRACE_ISA {

// The sums of two rows for 16 outputs; register i: [row 0: outputs 2i, 2i + 1; row 1: the same].
struct PairSums {
  int32x4_t v[8];
};

// Eight inputs of 16 outputs; register i: outputs 2i and 2i + 1, eight bytes each.
struct WideWeights {
  int8x16_t v[8];
};

inline int8x16_t zip_low(int8x16_t x, int8x16_t y) {
  return vreinterpretq_s8_s32(vzip1q_s32(vreinterpretq_s32_s8(x), vreinterpretq_s32_s8(y)));
}
inline int8x16_t zip_high(int8x16_t x, int8x16_t y) {
  return vreinterpretq_s8_s32(vzip2q_s32(vreinterpretq_s32_s8(x), vreinterpretq_s32_s8(y)));
}
inline WideWeights zip(Bytes first, Bytes second) {
  return {{zip_low(first.a, second.a), zip_high(first.a, second.a), zip_low(first.b, second.b),
           zip_high(first.b, second.b), zip_low(first.c, second.c), zip_high(first.c, second.c),
           zip_low(first.d, second.d), zip_high(first.d, second.d)}};
}

// Inputs 8 step .. 8 step + 7 of a group.
template <class F>
WideWeights wide_weights(const unsigned char* group, int step) {
  if constexpr (F::kCodesPerByte == 1) {
    return zip(F::weights(load_bytes(group + step * 128)),
               F::weights(load_bytes(group + step * 128 + 64)));
  } else {
    const Bytes packed = load_bytes(group + step * 64);
    return zip(F::weights(low_nibbles(packed)), F::weights(high_nibbles(packed)));
  }
}

inline PairSums pair_start(int32_t first, int32_t second) {
  const int32x4_t v = vcombine_s32(vdup_n_s32(first), vdup_n_s32(second));
  return {{v, v, v, v, v, v, v, v}};
}

inline void pair_dot(PairSums& sums, const WideWeights& w, const int8_t* first,
                     const int8_t* second) {
  const int8x16_t x = vcombine_s8(vld1_s8(first), vld1_s8(second));
  for (int i = 0; i < 8; ++i) sums.v[i] = vmmlaq_s32(sums.v[i], x, w.v[i]);
}

// The half of every register that belongs to one row of the pair, in the order of the outputs.
template <int row>
Ints row_sums(const PairSums& sums) {
  const auto join = [](int32x4_t x, int32x4_t y) {
    const int64x2_t u = vreinterpretq_s64_s32(x);
    const int64x2_t v = vreinterpretq_s64_s32(y);
    return vreinterpretq_s32_s64(row == 0 ? vzip1q_s64(u, v) : vzip2q_s64(u, v));
  };
  return {join(sums.v[0], sums.v[1]), join(sums.v[2], sums.v[3]), join(sums.v[4], sums.v[5]),
          join(sums.v[6], sums.v[7])};
}

// Adds what P pairs of rows have of group g.
template <int P>
[[gnu::always_inline]] inline void add_pairs(Floats (&acc)[2 * P], const PairSums (&dot)[P],
                                             const float* (&sx)[2 * P], int32_t g, Floats sw) {
  unroll<P>([&](auto i) __attribute__((always_inline)) {
    acc[2 * i] = fma(to_float(row_sums<0>(dot[i])), mul(splat(sx[2 * i][g]), sw), acc[2 * i]);
    acc[2 * i + 1] =
        fma(to_float(row_sums<1>(dot[i])), mul(splat(sx[2 * i + 1][g]), sw), acc[2 * i + 1]);
  });
}

// P pairs of rows. Two are 16 registers of sums beside 8 of weights, and the file has 32.
template <class F, int group, int P>
void pair_tile(const LinearArgs& a, int32_t block, int32_t row) {
  const int8_t* x[2 * P];
  const float* sx[2 * P];
  const int32_t* sums[2 * P];
  Floats acc[2 * P];
  start_rows(a, row, group, x, sx, sums, acc);
  const unsigned char* p = block_start(a, block);
  constexpr int kCodeBytes = group * kBlockOutputs / F::kCodesPerByte;
  for (int32_t g = 0; g < a.num_groups; ++g) {
    PairSums dot[P];
    for (int i = 0; i < P; ++i) {
      dot[i] = pair_start(-F::kOffset * sums[2 * i][g], -F::kOffset * sums[2 * i + 1][g]);
    }
    for (int line = 0; line < kCodeBytes; line += 64) prefetch(p + line + kPrefetchBytes);
    for (int step = 0; step < group / 8; ++step) {
      const WideWeights w = wide_weights<F>(p, step);
      for (int i = 0; i < P; ++i) {
        pair_dot(dot[i], w, x[2 * i] + step * 8, x[2 * i + 1] + step * 8);
      }
    }
    add_pairs(acc, dot, sx, g, F::scales(p + kCodeBytes));
    if constexpr (F::kHasMinimum) {
      add_minimums(acc, sums, sx, g, load_f32(p + kCodeBytes + 64));
    }
    for (int r = 0; r < 2 * P; ++r) x[r] += group;
    p += kCodeBytes + F::kScaleBytes;
  }
  for (int r = 0; r < 2 * P; ++r) store_outputs(a, block, row + r, acc[r]);
}

template <class F, int group>
void pair_blocks(const LinearArgs& a) {
  for (int32_t block = 0; block < a.num_blocks; ++block) {
    int32_t row = 0;
    for (; row + 4 <= a.num_rows; row += 4) pair_tile<F, group, 2>(a, block, row);
    for (; row + 2 <= a.num_rows; row += 2) pair_tile<F, group, 1>(a, block, row);
    if (row < a.num_rows) one_row_tile<F, group, 1>(a, block, 0, row);
  }
}

inline void linear_q8_i8mm(const LinearArgs& a) { pair_blocks<Q8, 32>(a); }
inline void linear_mxfp4_i8mm(const LinearArgs& a) { pair_blocks<Mxfp4, 32>(a); }

// Calls the product of a format that has two groups.
template <class F, int group, int other>
void pair_groups(const LinearArgs& a) {
  if (a.group == other) {
    pair_blocks<F, other>(a);
  } else {
    pair_blocks<F, group>(a);
  }
}

inline void linear_q4_i8mm(const LinearArgs& a) { pair_groups<Q4, 32, 64>(a); }
inline void linear_q8f_i8mm(const LinearArgs& a) { pair_groups<Q8f, 32, 16>(a); }
inline void linear_q8a_i8mm(const LinearArgs& a) { pair_groups<Q8a, 32, 16>(a); }
inline void linear_q4f_i8mm(const LinearArgs& a) { pair_groups<Q4f, 32, 64>(a); }
inline void linear_q4a_i8mm(const LinearArgs& a) { pair_groups<Q4a, 32, 64>(a); }

// ---- formats with multiples

template <class S, int P>
void super_pair_tile(const LinearArgs& a, int32_t block, int32_t row) {
  constexpr int kGroup = S::kGroup;
  const int8_t* x[2 * P];
  const float* sx[2 * P];
  const int32_t* sums[2 * P];
  Floats acc[2 * P];
  start_rows(a, row, kGroup, x, sx, sums, acc);
  const unsigned char* p = block_start(a, block);
  for (int32_t first = 0; first < a.num_groups; first += S::kLayout.groups) {
    SuperScales<S> numbers;
    numbers.read(p, kSuperPrefetchBytes);
    const int32_t left = a.num_groups - first;
    const int32_t groups = left < S::kLayout.groups ? left : S::kLayout.groups;
    for (int32_t step = 0; step * (kStepInputs / kGroup) < groups; ++step) {
      const StepPlanes<S> planes(p, step);
      planes.fetch(kSuperPrefetchBytes);
      unroll<kStepInputs / kGroup>([&](auto part) {
        const int32_t in_super = step * (kStepInputs / kGroup) + part;
        if (in_super >= groups) return;
        const int32_t g = first + in_super;
        PairSums dot[P];
        for (int i = 0; i < P; ++i) {
          dot[i] = pair_start(-S::kPlanes.offset * sums[2 * i][g],
                              -S::kPlanes.offset * sums[2 * i + 1][g]);
        }
        unroll<kGroup / 8>([&](auto j) {
          constexpr int kVector = part * (kGroup / 4) + 2 * j;
          const WideWeights w =
              zip(planes.template codes<kVector>(), planes.template codes<kVector + 1>());
          for (int i = 0; i < P; ++i) pair_dot(dot[i], w, x[2 * i] + j * 8, x[2 * i + 1] + j * 8);
        });
        add_pairs(acc, dot, sx, g, numbers.scales(in_super));
        if constexpr (S::kPlanes.has_minimum) {
          add_minimums(acc, sums, sx, g, numbers.minimums(in_super));
        }
        for (int r = 0; r < 2 * P; ++r) x[r] += kGroup;
      });
    }
    p += S::kLayout.nbytes;
  }
  for (int r = 0; r < 2 * P; ++r) store_outputs(a, block, row + r, acc[r]);
}

template <class S>
void super_pair_blocks(const LinearArgs& a) {
  for (int32_t block = 0; block < a.num_blocks; ++block) {
    int32_t row = 0;
    for (; row + 4 <= a.num_rows; row += 4) super_pair_tile<S, 2>(a, block, row);
    for (; row + 2 <= a.num_rows; row += 2) super_pair_tile<S, 1>(a, block, row);
    if (row < a.num_rows) super_row_tile<S, 1>(a, block, 0, row);
  }
}

inline void linear_q2k_i8mm(const LinearArgs& a) { super_pair_blocks<Q2k>(a); }
inline void linear_q3k_i8mm(const LinearArgs& a) { super_pair_blocks<Q3k>(a); }
inline void linear_q4k_i8mm(const LinearArgs& a) { super_pair_blocks<Q4k>(a); }
inline void linear_q5k_i8mm(const LinearArgs& a) { super_pair_blocks<Q5k>(a); }
inline void linear_q6k_i8mm(const LinearArgs& a) { super_pair_blocks<Q6k>(a); }
inline void linear_q6ka_i8mm(const LinearArgs& a) { super_pair_blocks<Q6ka>(a); }

inline const KernelTable* make_i8mm_table() {
  static const KernelTable table = [] {
    KernelTable t = *make_table();
    t.linear[static_cast<int>(Format::Q8)] = linear_q8_i8mm;
    t.linear[static_cast<int>(Format::Q4)] = linear_q4_i8mm;
    t.linear[static_cast<int>(Format::MXFP4)] = linear_mxfp4_i8mm;
    t.linear[static_cast<int>(Format::Q8F)] = linear_q8f_i8mm;
    t.linear[static_cast<int>(Format::Q8A)] = linear_q8a_i8mm;
    t.linear[static_cast<int>(Format::Q4F)] = linear_q4f_i8mm;
    t.linear[static_cast<int>(Format::Q4A)] = linear_q4a_i8mm;
    t.linear[static_cast<int>(Format::Q2K)] = linear_q2k_i8mm;
    t.linear[static_cast<int>(Format::Q3K)] = linear_q3k_i8mm;
    t.linear[static_cast<int>(Format::Q4K)] = linear_q4k_i8mm;
    t.linear[static_cast<int>(Format::Q5K)] = linear_q5k_i8mm;
    t.linear[static_cast<int>(Format::Q6K)] = linear_q6k_i8mm;
    t.linear[static_cast<int>(Format::Q6KA)] = linear_q6ka_i8mm;
    return t;
  }();
  return &table;
}

}  // namespace headrace::HEADRACE_ISA
