// The tiles of kernels/tile_amx.h, in loops. Found before it where AMX is emulated
// (CMakeLists.txt).
#pragma once

#include <cstdint>
#include <cstring>

namespace headrace::HEADRACE_ISA {

inline constexpr int kTileRows = 16;
inline constexpr int64_t kTileBytes = 1024;
inline constexpr int kSums = 0, kActivations = 1, kWeights = 2;

struct Tile {
  int8_t data[kTileRows][64];
  int num_rows, row_bytes;
};
inline thread_local Tile tiles[3];
inline thread_local bool is_configured = false;

inline Tile& tile_in_use(int index) {
  if (!is_configured) __builtin_trap();  // as the processor does
  return tiles[index];
}

class Tiles {
 public:
  explicit Tiles(int group) {
    std::memset(tiles, 0, sizeof tiles);
    for (int i = 0; i < 3; ++i) {
      tiles[i].row_bytes = i == kActivations ? group : 64;
      tiles[i].num_rows = i == kWeights ? group / 4 : kTileRows;
    }
    is_configured = true;
  }
  ~Tiles() { is_configured = false; }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

template <int tile>
void tile_zero() {
  std::memset(tile_in_use(tile).data, 0, kTileBytes);
}

template <int tile, int num_bytes>
void tile_load(const int8_t* from, int64_t stride) {
  tile_zero<tile>();
  Tile& t = tile_in_use(tile);
  if ((t.num_rows - 1) * stride + t.row_bytes > num_bytes) __builtin_trap();
  for (int row = 0; row < t.num_rows; ++row) {
    std::memcpy(t.data[row], from + row * stride, static_cast<size_t>(t.row_bytes));
  }
}

template <int tile>
void tile_store(int32_t* to) {
  std::memcpy(to, tile_in_use(tile).data, kTileBytes);
}

template <int sums, int activations, int weights>
void tile_dot() {
  Tile &out = tile_in_use(sums), &x = tile_in_use(activations), &w = tile_in_use(weights);
  for (int row = 0; row < out.num_rows; ++row) {
    int32_t sum[16];
    std::memcpy(sum, out.data[row], sizeof sum);
    for (int k = 0; k < x.row_bytes; ++k) {
      for (int o = 0; o < 16; ++o) sum[o] += int{x.data[row][k]} * w.data[k / 4][4 * o + k % 4];
    }
    std::memcpy(out.data[row], sum, sizeof sum);
  }
}

}  // namespace headrace::HEADRACE_ISA
