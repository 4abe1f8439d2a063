// Loops whose count is a constant, written out. An array of registers indexed by a loop variable
// lives in memory if the compiler unrolls the loop too late (GCC does from about 8 steps on); with
// a constant index it lives in registers.
#pragma once

namespace headrace::HEADRACE_ISA {

template <int i>
struct Index {
  constexpr operator int() const { return i; }
};

// call(Index<0>), call(Index<1>), ... below `count`. Where a vector is an array, which lives in
// memory either way, a body that takes an int, so needs no constants, is a plain loop: to write it
// out would only take the compiler minutes.
template <int count, class Call>
[[gnu::always_inline]] inline void unroll(const Call& call) {
  if constexpr (!kLanesInRegisters && requires { &Call::operator(); }) {
    for (int i = 0; i < count; ++i) call(i);
  } else if constexpr (count > 0) {
    unroll<count - 1>(call);
    call(Index<count - 1>{});
  }
}

}  // namespace headrace::HEADRACE_ISA
