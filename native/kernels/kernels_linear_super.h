// Products with the formats whose scales are multiples of a unit of 256 inputs (q2k to q6k). A
// group's scale is formed first, exactly; then a group is computed as in kernels_linear.h, so that
// the sums are those of the same weights in q4a, q8a or q8f, to the bit.
#pragma once

#include <cstdint>

#include "kernels/kernel_table.h"
#include "kernels/linear_rows.h"
#include "kernels/unroll.h"

namespace headrace::HEADRACE_ISA {

inline constexpr int64_t kSuperPrefetchBytes = 2048;
// The same for one row, of which a core may read several streams.
inline constexpr int64_t kSuperRowPrefetchBytes = 768;

// Two groups of 16 inputs or one of 32: each plane has whole vectors of them.
inline constexpr int32_t kStepInputs = 32;

template <Format f, int32_t g>
struct Super {
  static constexpr int32_t kGroup = g;
  static constexpr CodePlanes kPlanes = code_planes(f);
  static constexpr SuperLayout kLayout = super_layout(f, g);
  using Run = SmallRun<(1 << (kPlanes.low_bits + kPlanes.high_bits)) - 1>;
  static constexpr int kRun = kRunQuads<Run, g / 4>;
};
using Q2k = Super<Format::Q2K, 16>;
using Q3k = Super<Format::Q3K, 16>;
using Q4k = Super<Format::Q4K, 32>;
using Q5k = Super<Format::Q5K, 32>;
using Q6k = Super<Format::Q6K, 16>;
using Q6ka = Super<Format::Q6KA, 16>;

// The planes of 32 inputs, from a super-group's start.
template <class S>
struct StepPlanes {
  const unsigned char* low;
  const unsigned char* high;

  StepPlanes(const unsigned char* super, int32_t step)
      : low(super + S::kLayout.low + step * S::kPlanes.low_bits * 64),
        high(super + S::kLayout.high + step * S::kPlanes.high_bits * 64) {}

  // Codes of inputs 4i..4i + 3 of the step, not yet less the offset.
  template <int i>
  [[gnu::always_inline]] Bytes codes() const {
    constexpr int kLow = S::kPlanes.low_bits, kHigh = S::kPlanes.high_bits;
    constexpr int kTogether = 8 / kLow;
    const Bytes codes =
        move_bits<i % kTogether * kLow, 0, kLow>(load_bytes(low + i / kTogether * 64));
    if constexpr (kHigh == 0) {
      return codes;
    } else {
      constexpr int kHighTogether = 8 / kHigh;
      return join_bits<i % kHighTogether * kHigh, kLow, kHigh>(
          codes, load_bytes(high + i / kHighTogether * 64));
    }
  }

  [[gnu::always_inline]] void fetch(int64_t ahead) const {
    for (int i = 0; i < S::kPlanes.low_bits; ++i) prefetch(low + i * 64 + ahead);
    for (int i = 0; i < S::kPlanes.high_bits; ++i) prefetch(high + i * 64 + ahead);
  }
};

// The numbers of a super-group.
template <class S>
struct SuperScales {
  const unsigned char* super;
  Floats units, minimum_units;

  [[gnu::always_inline]] void read(const unsigned char* p, int64_t ahead) {
    super = p;
    units = load_f16(p);
    if constexpr (S::kPlanes.has_minimum) minimum_units = load_f16(p + S::kLayout.minimum_units);
    for (int at = 0; at < S::kLayout.low; at += 64) prefetch(p + at + ahead);
  }
  // Of a group of the super-group.
  [[gnu::always_inline]] Floats scales(int32_t group) const {
    return mul(units, load_int8(super + S::kLayout.multiples + group * kBlockOutputs));
  }
  [[gnu::always_inline]] Floats minimums(int32_t group) const {
    return mul(minimum_units,
               load_int8(super + S::kLayout.minimum_multiples + group * kBlockOutputs));
  }
};

// One row by B blocks, `stride` apart.
template <class S, int B>
void super_row_tile(const LinearArgs& a, int32_t block, int32_t stride, int32_t row) {
  constexpr int kGroup = S::kGroup;
  constexpr int kVectors = kGroup / 4;
  constexpr int kParts = kStepInputs / kGroup;
  const int8_t* x[1];
  const float* sx[1];
  const int32_t* sums[1];
  Floats acc[B][1];
  const unsigned char* p[B];
  start_blocks(a, block, stride, row, kGroup, x, sx, sums, acc, p);
  for (int32_t first = 0; first < a.num_groups; first += S::kLayout.groups) {
    SuperScales<S> numbers[B];
    unroll<B>([&](auto b) { numbers[b].read(p[b], kSuperRowPrefetchBytes); });
    const int32_t left = a.num_groups - first;
    const int32_t groups = left < S::kLayout.groups ? left : S::kLayout.groups;
    for (int32_t step = 0; step * kParts < groups; ++step) {
      unroll<B>([&](auto b) { StepPlanes<S>(p[b], step).fetch(kSuperRowPrefetchBytes); });
      unroll<kParts>([&](auto part) __attribute__((always_inline)) {
        const int32_t in_super = step * kParts + part;
        if (in_super >= groups) return;
        const int32_t g = first + in_super;
        const Ints begin = splat_int(-S::kPlanes.offset * sums[0][g]);
        Ints dot[B];
        unroll<B>([&](auto b) { dot[b] = begin; });
        unroll<kVectors / S::kRun>([&](auto from) __attribute__((always_inline)) {
          typename S::Run run[B];
          unroll<B>([&](auto b) { run[b].start(dot[b]); });
          unroll<S::kRun>([&](auto i) __attribute__((always_inline)) {
            constexpr int j = from * S::kRun + i;
            unroll<B>([&](auto b) __attribute__((always_inline)) {
              const Bytes w = StepPlanes<S>(p[b], step).template codes<part * kVectors + j>();
              run[b].add(w, x[0] + j * 4);
            });
          });
          unroll<B>([&](auto b) { dot[b] = run[b].sum(dot[b]); });
        });
        unroll<B>([&](auto b) __attribute__((always_inline)) {
          const Floats sw = numbers[b].scales(in_super);
          acc[b][0] = fma(to_float(dot[b]), mul(splat(sx[0][g]), sw), acc[b][0]);
          if constexpr (S::kPlanes.has_minimum) {
            add_minimums(acc[b], sums, sx, g, numbers[b].minimums(in_super));
          }
        });
        x[0] += kGroup;
      });
    }
    unroll<B>([&](auto b) { p[b] += S::kLayout.nbytes; });
  }
  unroll<B>([&](auto b) { store_outputs(a, block + b * stride, row, acc[b][0]); });
}

template <class S, int R>
void super_tile(const LinearArgs& a, int32_t block, int32_t row) {
  constexpr int kGroup = S::kGroup;
  constexpr int kVectors = kGroup / 4;
  const int8_t* x[R];
  const float* sx[R];
  const int32_t* sums[R];
  Floats acc[R];
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
      unroll<kStepInputs / kGroup>([&](auto part) __attribute__((always_inline)) {
        const int32_t in_super = step * (kStepInputs / kGroup) + part;
        if (in_super >= groups) return;
        const int32_t g = first + in_super;
        Ints dot[R];
        unroll<R>([&](auto r) __attribute__((always_inline)) {
          dot[r] = splat_int(-S::kPlanes.offset * sums[r][g]);
        });
        unroll<kVectors / S::kRun>([&](auto from) __attribute__((always_inline)) {
          typename S::Run run[R];
          unroll<R>([&](auto r) { run[r].start(dot[r]); });
          unroll<S::kRun>([&](auto i) __attribute__((always_inline)) {
            constexpr int j = from * S::kRun + i;
            const Bytes w = planes.template codes<part * kVectors + j>();
            unroll<R>([&](auto r) __attribute__((always_inline)) { run[r].add(w, x[r] + j * 4); });
          });
          unroll<R>([&](auto r) { dot[r] = run[r].sum(dot[r]); });
        });
        const Floats sw = numbers.scales(in_super);
        unroll<R>([&](auto r) __attribute__((always_inline)) {
          acc[r] = fma(to_float(dot[r]), mul(splat(sx[r][g]), sw), acc[r]);
          x[r] += kGroup;
        });
        if constexpr (S::kPlanes.has_minimum) {
          add_minimums(acc, sums, sx, g, numbers.minimums(in_super));
        }
      });
    }
    p += S::kLayout.nbytes;
  }
  unroll<R>([&](auto r) { store_outputs(a, block, row + r, acc[r]); });
}

// The last rows of a call, at most R.
template <class S, int R>
void super_rest(const LinearArgs& a, int32_t block, int32_t row) {
  if constexpr (R == 1) {
    if (row < a.num_rows) super_row_tile<S, 1>(a, block, 0, row);
  } else if constexpr (R > 1) {
    if (a.num_rows - row == R) {
      super_tile<S, R>(a, block, row);
    } else {
      super_rest<S, R - 1>(a, block, row);
    }
  }
}

template <class S>
void super_blocks(const LinearArgs& a) {
  if (a.num_rows == 1) {
    blocks_apart(a.num_blocks, [&](auto streams, int32_t block, int32_t stride) {
      super_row_tile<S, streams>(a, block, stride, 0);
    });
    return;
  }
  for (int32_t block = 0; block < a.num_blocks; ++block) {
    int32_t row = 0;
    for (; row + kSuperRowsMost <= a.num_rows; row += kSuperRowsMost) {
      super_tile<S, kSuperRowsMost>(a, block, row);
    }
    super_rest<S, kSuperRowsMost - 1>(a, block, row);
  }
}

inline void linear_q2k(const LinearArgs& a) { super_blocks<Q2k>(a); }
inline void linear_q3k(const LinearArgs& a) { super_blocks<Q3k>(a); }
inline void linear_q4k(const LinearArgs& a) { super_blocks<Q4k>(a); }
inline void linear_q5k(const LinearArgs& a) { super_blocks<Q5k>(a); }
inline void linear_q6k(const LinearArgs& a) { super_blocks<Q6k>(a); }
inline void linear_q6ka(const LinearArgs& a) { super_blocks<Q6ka>(a); }

}  // namespace headrace::HEADRACE_ISA
