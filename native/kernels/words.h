// Sixteen bytes in a register of whatever the compiler targets: SSE2 and NEON have all that is
// used. For laying codes out, which is the same work on every instruction set.
#pragma once

#include <cstdint>
#include <cstring>

namespace headrace {

using Bytes16 = uint8_t __attribute__((vector_size(16)));
using Signed16 = int8_t __attribute__((vector_size(16)));
using Halves8 = uint16_t __attribute__((vector_size(16)));
using Words4 = uint32_t __attribute__((vector_size(16)));
using Doubles2 = uint64_t __attribute__((vector_size(16)));

template <class T>
T load_as(const uint8_t* p) {
  T value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

template <class T>
void store_as(uint8_t* p, T value) {
  std::memcpy(p, &value, sizeof value);
}

// Words i of four outputs become vector i.
inline void transpose(Words4 (&rows)[4]) {
  const Words4 a = __builtin_shufflevector(rows[0], rows[1], 0, 4, 1, 5);
  const Words4 b = __builtin_shufflevector(rows[0], rows[1], 2, 6, 3, 7);
  const Words4 c = __builtin_shufflevector(rows[2], rows[3], 0, 4, 1, 5);
  const Words4 d = __builtin_shufflevector(rows[2], rows[3], 2, 6, 3, 7);
  rows[0] = __builtin_shufflevector(a, c, 0, 1, 4, 5);
  rows[1] = __builtin_shufflevector(a, c, 2, 3, 6, 7);
  rows[2] = __builtin_shufflevector(b, d, 0, 1, 4, 5);
  rows[3] = __builtin_shufflevector(b, d, 2, 3, 6, 7);
}

// Items i of eight outputs become vector i: three rounds that interleave two halves.
inline void transpose(Halves8 (&rows)[8]) {
  for (int round = 0; round < 3; ++round) {
    Halves8 next[8];
    for (int i = 0; i < 4; ++i) {
      const Halves8 x = rows[i], y = rows[i + 4];
      next[2 * i] = __builtin_shufflevector(x, y, 0, 8, 1, 9, 2, 10, 3, 11);
      next[2 * i + 1] = __builtin_shufflevector(x, y, 4, 12, 5, 13, 6, 14, 7, 15);
    }
    for (int i = 0; i < 8; ++i) rows[i] = next[i];
  }
}

}  // namespace headrace
