// The AMX instructions that the kernels use, with every operand that they read and write.
//
// Not the compiler's intrinsics: in GCC 12 they declare neither the memory that a tile load reads
// nor more than eight bytes of the configuration, so that stores before them may vanish or move.
#pragma once

#include <cstdint>

namespace headrace::HEADRACE_ISA {

inline constexpr int kTileRows = 16;
inline constexpr int64_t kTileBytes = 1024;

// The tile registers in use. The processor renames them: pairs used in turn were no faster.
inline constexpr int kSums = 0, kActivations = 1, kWeights = 2;

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t num_rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

// The calling thread's tiles for as long as this lives; afterwards a switch of threads saves
// nothing for them.
class Tiles {
 public:
  explicit Tiles(int group) {
    TileConfig config;
    for (int i = 0; i < 3; ++i) {
      config.row_bytes[i] = static_cast<uint16_t>(i == kActivations ? group : 64);
      config.num_rows[i] = static_cast<uint8_t>(i == kWeights ? group / 4 : kTileRows);
    }
    asm volatile("ldtilecfg %0" : : "m"(config));
  }
  ~Tiles() { asm volatile("tilerelease"); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

template <int tile, int num_bytes>
inline void tile_load(const int8_t* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2"
               :
               : "r"(from), "r"(stride), "i"(tile),
                 "m"(*reinterpret_cast<const int8_t (*)[num_bytes]>(from)));
}

template <int tile>
inline void tile_store(int32_t* to) {
  asm volatile("tilestored %%tmm%c3, (%1,%2,1)"
               : "=m"(*reinterpret_cast<int32_t (*)[kTileBytes / 4]>(to))
               : "r"(to), "r"(int64_t{64}), "i"(tile));
}

template <int tile>
inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" : : "i"(tile));
}

// sums += activations [16, group] times weights [group / 4, 16, 4], all signed bytes.
template <int sums, int activations, int weights>
inline void tile_dot() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0"
               :
               : "i"(sums), "i"(activations), "i"(weights));
}

}  // namespace headrace::HEADRACE_ISA
