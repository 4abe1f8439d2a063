// How the dots of a group gather, quad by quad: in the 32 bits that they end in.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

namespace headrace::HEADRACE_ISA {

// A run starts from the sum before it, adds quads, and gives the sum after it. `kQuads` are written
// out together; a narrow run (simd_avx2.h) takes no more than these.
template <class Ints, auto dot, int quads>
struct WideRun {
  static constexpr int kQuads = quads;
  static constexpr bool kNarrow = false;
  Ints total;

  void start(Ints before) { total = before; }
  template <class Bytes>
  void add(Bytes w, const int8_t* quad) {
    total = dot(total, w, quad);
  }
  Ints sum(Ints) const { return total; }
};

// Quads of a run where a group has `quads`: a power of two, as they are.
template <class Run, int quads>
inline constexpr int kRunQuads =
    static_cast<int>(std::bit_floor(static_cast<unsigned>(std::min(Run::kQuads, quads))));

}  // namespace headrace::HEADRACE_ISA
