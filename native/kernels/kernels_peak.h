// What the arithmetic units reach when everything is in registers: the ceilings that benchmarks set
// kernels beside. Not part of any model.
#pragma once

#include <cstdint>

#include "kernels/kernel_table.h"
#include "kernels/unroll.h"
#include "kernels/wide_run.h"

namespace headrace::HEADRACE_ISA {

// Chains that hide the latency of one operation and still fit the registers: ten of one 512-bit
// register, six of two 256-bit ones. (More of the latter spill.)
inline constexpr int kPeakChains = alignof(Floats) == 64 ? 10 : 6;

inline int64_t peak_float(int64_t rounds, float* sink) {
  Floats acc[kPeakChains];
  for (int i = 0; i < kPeakChains; ++i) acc[i] = splat(static_cast<float>(i));
  const Floats x = splat(sink[0]);
  for (int64_t round = 0; round < rounds; ++round) {
    for (int i = 0; i < kPeakChains; ++i) acc[i] = fma(acc[i], x, x);
  }
  for (int i = 1; i < kPeakChains; ++i) acc[0] = add(acc[0], acc[i]);
  store(sink, acc[0]);
  return rounds * kPeakChains * kBlockOutputs * 2;
}

// Sixteen outputs by four inputs per dot; every chain has inputs of its own, and they change, or a
// compiler would multiply once. A narrow run overflows here, which costs nothing and means nothing.
inline int64_t peak_int8(int64_t rounds, int32_t* sink) {
  SmallRun<15> acc[kPeakChains];
  alignas(64) int8_t quads[128];
  for (int i = 0; i < 128; ++i) quads[i] = static_cast<int8_t>(sink[0] + i);
  const Bytes weights = low_nibbles(load_bytes(quads));
  unroll<kPeakChains>([&](auto i) { acc[i].start(splat_int(i)); });
  for (int64_t round = 0; round < rounds; ++round) {
    const int8_t* quad = quads + 4 * (round % 16);
    unroll<kPeakChains>([&](auto i) { acc[i].add(weights, quad + 4 * i); });
  }
  Ints sum = splat_int(0);
  for (int i = 0; i < kPeakChains; ++i) sum = add(sum, acc[i].sum(splat_int(0)));
  store(sink, sum);
  return rounds * kPeakChains * kBlockOutputs * 4 * 2;
}

}  // namespace headrace::HEADRACE_ISA
