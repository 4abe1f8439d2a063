// Quantised products of many rows by AMX tiles: 16 rows times one group of a block of 16 outputs
// are one tile of exact int32 sums. The vector units scale and add each tile as the contract says,
// group by group, while the tile unit multiplies the next ones. What bounds the speed is getting
// the sums out of the tile registers and scaling them, not multiplying (docs/experiments.md).
//
// A call copies its rows into tiles once (rows far apart by a power of two would share few places
// of the first cache), and unpacks weights for all of them.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/kernel_table.h"
#include "kernels/linear_rows.h"
#include "kernels/scratch.h"
#include "kernels/unroll.h"

namespace headrace::HEADRACE_ISA {

// ---- the weights of one group as signed bytes [group / 4, 16, 4], their scales and minimums

struct TileQ8 {
  static constexpr int kCodesPerByte = 1;
  static constexpr int kScaleBytes = 32;
  static constexpr bool kHasMinimum = false;
  static Floats scales(const unsigned char* p) { return load_f16(p); }
};

struct TileQ8f : TileQ8 {
  static constexpr int kScaleBytes = 64;
  static Floats scales(const unsigned char* p) { return load_f32(p); }
};

struct TileQ8a : TileQ8f {
  static constexpr int kScaleBytes = 128;
  static constexpr bool kHasMinimum = true;
};

struct TileQ4 {
  static constexpr int kCodesPerByte = 2;
  static constexpr int kScaleBytes = 32;
  static constexpr bool kHasMinimum = false;
  static Floats scales(const unsigned char* p) { return load_f16(p); }
  // Code + 8 is stored, so bits 3 to 7 of the signed code are the opposite of the nibble's bit 3.
  static __m512i low(__m512i packed) {
    return _mm512_gf2p8affine_epi64_epi8(packed, _mm512_set1_epi64(0x0102040808080808), 0xf8);
  }
  static __m512i high(__m512i packed) {
    return _mm512_gf2p8affine_epi64_epi8(packed, _mm512_set1_epi64(0x1020408080808080), 0xf8);
  }
};

struct TileQ4f : TileQ4 {
  static constexpr int kScaleBytes = 64;
  static Floats scales(const unsigned char* p) { return load_f32(p); }
};

struct TileQ4a {
  static constexpr int kCodesPerByte = 2;
  static constexpr int kScaleBytes = 128;
  static constexpr bool kHasMinimum = true;
  static Floats scales(const unsigned char* p) { return load_f32(p); }
  static __m512i low(__m512i packed) { return low_nibbles({packed}).v; }
  static __m512i high(__m512i packed) { return high_nibbles({packed}).v; }
};

struct TileMxfp4 {
  static constexpr int kCodesPerByte = 2;
  static constexpr int kScaleBytes = 16;
  static constexpr bool kHasMinimum = false;
  static Floats scales(const unsigned char* p) { return half_e8m0(p); }
  // A lookup by the low six bits: the table repeats, so the other nibble's bits do not matter.
  static __m512i low(__m512i packed) {
    const __m512i doubled = _mm512_broadcast_i32x4(
        _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12));
    return _mm512_permutexvar_epi8(packed, doubled);
  }
  static __m512i high(__m512i packed) { return low(_mm512_srli_epi16(packed, 4)); }
};

// Formats with multiples (kernels_linear_super.h) are unpacked a super-group at a time.
template <class S>
struct TileSuper {
  static constexpr bool kHasMinimum = S::kPlanes.has_minimum;
};

template <class F, int group>
inline constexpr int64_t kGroupBytes = group * kBlockOutputs / F::kCodesPerByte + F::kScaleBytes;

// Of the first groups of a block; with multiples, up to the end of a super-group.
template <int group, class F>
constexpr int64_t bytes_of_groups(F, int64_t count) {
  return count * kGroupBytes<F, group>;
}
template <int group, class S>
constexpr int64_t bytes_of_groups(TileSuper<S>, int64_t count) {
  return (count + S::kLayout.groups - 1) / S::kLayout.groups * S::kLayout.nbytes;
}

// As unpack_group below, for the first groups of a super-group. Of two groups of a step both are
// unpacked, though the matrix may end with the first.
template <class S>
void unpack_super_group(const unsigned char* p, int32_t groups, int8_t* weights, float* scales,
                        float* minimums) {
  constexpr int kParts = kStepInputs / S::kGroup;
  SuperScales<S> numbers;
  numbers.read(p, kSuperPrefetchBytes);
  const __m512i offset = _mm512_set1_epi8(S::kPlanes.offset);
  for (int32_t step = 0; step * kParts < groups; ++step) {
    const StepPlanes<S> planes(p, step);
    unroll<8>([&](auto i) {
      const __m512i codes = planes.template codes<i>().v;
      _mm512_store_si512(weights + (step * 8 + i) * 64,
                         S::kPlanes.offset == 0 ? codes : _mm512_sub_epi8(codes, offset));
    });
  }
  for (int32_t g = 0; g < groups; ++g) {
    store(scales + g * kBlockOutputs, numbers.scales(g));
    if constexpr (S::kPlanes.has_minimum) {
      store(minimums + g * kBlockOutputs, numbers.minimums(g));
    }
  }
}

template <class F, int group>
void unpack_group(const unsigned char* p, int8_t* weights, float* scales, float* minimums) {
  constexpr int kVectors = group / 4 / F::kCodesPerByte;
  for (int j = 0; j < kVectors; ++j) {
    const __m512i packed = _mm512_loadu_si512(p + j * 64);
    if constexpr (F::kCodesPerByte == 1) {
      _mm512_store_si512(weights + j * 64, packed);
    } else {
      _mm512_store_si512(weights + j * 128, F::low(packed));
      _mm512_store_si512(weights + j * 128 + 64, F::high(packed));
    }
  }
  store(scales, F::scales(p + kVectors * 64));
  if constexpr (F::kHasMinimum) store(minimums, load_f32(p + kVectors * 64 + 64));
}

// Blocks whose results are kept and written together, because rows of results lie far apart: each
// is another page, and often the same places of the cache.
inline constexpr int32_t kBlocksTogether = 4;
inline constexpr int32_t kResultStride = kBlocksTogether * kBlockOutputs;

// ---- all row tiles of a call, one block, some groups

// Unpacked at a time: 8 KiB, so that two such chunks and a chunk of activations stay in the first
// cache.
inline constexpr int32_t kChunkInputs = 512;
// Of activations in tiles; more rows than fit are taken one part after the other.
inline constexpr int64_t kMaxActivationBytes = 384 * 1024;

template <int group>
[[gnu::always_inline]] inline void start_tile(const int8_t* x, const int8_t* w, int32_t* sums) {
  tile_load<kActivations, kTileRows * group>(x, group);
  tile_load<kWeights, kTileRows * group>(w, 64);
  tile_zero<kSums>();
  tile_dot<kSums, kActivations, kWeights>();
  tile_store<kSums>(sums);
}

// What one chunk of weights is multiplied with, and where the sums go.
struct TilePass {
  const int8_t* x;  // [tiles][num_groups][16 rows][group], at the chunk's first group
  const float* sx;  // [tiles][num_groups][16 rows], the same
  const float* xs;  // sums of codes, likewise; null without minimums
  const int8_t* w;  // [count][group / 4][16 outputs][4]
  const float* sw;  // [count][16 outputs]
  const float* mw;  // the minimums, likewise
  int32_t num_tiles;
  int32_t num_groups;  // of the whole rows
  int32_t count;       // groups of this chunk
  bool is_first;       // nothing was added up yet
  // Packed weights to fetch meanwhile, as many in each step: all at once, they would be waited for.
  const unsigned char* ahead;
  int64_t ahead_bytes;
  int32_t* sums;   // [4][16 rows][16 outputs]
  float* results;  // [tiles][16 rows][16 of kResultStride outputs]
};

// Products run two groups ahead of their use, across the border of row tiles.
template <class F, int group>
void multiply_tiles(const TilePass& pass) {
  constexpr int64_t kBytes = kTileRows * group;
  const auto sums_of = [&](int32_t step) { return pass.sums + step % 4 * (kTileBytes / 4); };
  const int32_t num_steps = pass.num_tiles * pass.count;
  const int8_t* x = pass.x;
  int32_t started = 0, started_group = 0;
  const unsigned char* ahead = pass.ahead;
  const unsigned char* const ahead_end = ahead + pass.ahead_bytes;
  const int64_t ahead_step = (pass.ahead_bytes / num_steps + 63) / 64 * 64;
  const auto fetch_some = [&]() __attribute__((always_inline)) {
    const unsigned char* const all = ahead + ahead_step;
    const unsigned char* const stop = all < ahead_end ? all : ahead_end;
    for (; ahead < stop; ahead += 64) prefetch(ahead);
  };
  const auto start_next = [&]() __attribute__((always_inline)) {
    if (started == num_steps) return;
    start_tile<group>(x, pass.w + started_group * kBytes, sums_of(started));
    ++started;
    x += kBytes;
    if (++started_group == pass.count) {
      started_group = 0;
      x += (pass.num_groups - pass.count) * kBytes;
    }
  };
  start_next();
  start_next();
  int32_t step = 0;
  for (int32_t t = 0; t < pass.num_tiles; ++t) {
    float* const out = pass.results + t * kTileRows * kResultStride;
    const int64_t first = int64_t{t} * pass.num_groups * kTileRows;
    const float* const sx = pass.sx + first;
    Floats acc[kTileRows];
    unroll<kTileRows>([&](auto r) __attribute__((always_inline)) {
      acc[r] = pass.is_first ? splat(0.0f) : load(out + r * kResultStride);
    });
    for (int32_t g = 0; g < pass.count; ++g, ++step) {
      start_next();
      fetch_some();
      const int32_t* dot = sums_of(step);
      const Floats scales = load(pass.sw + g * kBlockOutputs);
      unroll<kTileRows>([&](auto r) __attribute__((always_inline)) {
        const Ints ints{_mm512_load_si512(dot + r * kBlockOutputs)};
        acc[r] = fma(to_float(ints), mul(splat(sx[g * kTileRows + r]), scales), acc[r]);
      });
      if constexpr (F::kHasMinimum) {
        const float* const sums = pass.xs + first + g * kTileRows;
        const Floats minimums = load(pass.mw + g * kBlockOutputs);
        unroll<kTileRows>([&](auto r) __attribute__((always_inline)) {
          acc[r] = fma(splat(sums[r]), mul(splat(sx[g * kTileRows + r]), minimums), acc[r]);
        });
      }
    }
    unroll<kTileRows>(
        [&](auto r) __attribute__((always_inline)) { store(out + r * kResultStride, acc[r]); });
  }
}

// ---- all rows of a call

// The parts of the thread's scratch.
template <class F, int group>
struct TileWork {
  static constexpr int32_t kChunkGroups = kChunkInputs / group;

  int8_t* activations;     // [tiles][num_groups][16 rows][group]
  float* row_scales;       // [tiles][num_groups][16 rows]
  float* row_sums;         // the same; of formats with minimums
  int8_t* weights;         // [2][chunk groups][group / 4][16][4]: one is multiplied, one unpacked
  float* output_scales;    // [2][chunk groups][16]
  float* output_minimums;  // the same; of formats with minimums
  int32_t* sums;           // [4][16][16]
  float* results;          // [tiles][16][blocks together][16]

  TileWork(int32_t num_tiles, int32_t num_groups) {
    const int64_t groups = int64_t{num_tiles} * num_groups;
    constexpr int64_t kMinimums = F::kHasMinimum ? 1 : 0;
    const int64_t bytes[8] = {groups * kTileRows * group,
                              groups * kTileRows * 4,
                              groups * kTileRows * 4 * kMinimums,
                              2 * kChunkInputs * kBlockOutputs,
                              2 * kChunkGroups * kBlockOutputs * 4,
                              2 * kChunkGroups * kBlockOutputs * 4 * kMinimums,
                              4 * kTileBytes,
                              num_tiles * kBlocksTogether * kTileBytes};
    int64_t total = 0;
    for (const int64_t part : bytes) total += part;
    std::byte* at = thread_scratch(total);
    const auto next = [&](int i) {
      at += bytes[i];
      return at - bytes[i];
    };
    activations = reinterpret_cast<int8_t*>(next(0));
    row_scales = reinterpret_cast<float*>(next(1));
    row_sums = reinterpret_cast<float*>(next(2));
    weights = reinterpret_cast<int8_t*>(next(3));
    output_scales = reinterpret_cast<float*>(next(4));
    output_minimums = reinterpret_cast<float*>(next(5));
    sums = reinterpret_cast<int32_t*>(next(6));
    results = reinterpret_cast<float*>(next(7));
  }
};

// Rows [row, row + 16) of the call, those that exist; the others become zero.
template <class F, int group>
void pack_rows(const LinearArgs& a, int32_t row, int8_t* activations, float* scales, float* sums) {
  const int32_t rows = a.num_rows - row < kTileRows ? a.num_rows - row : kTileRows;
  if (rows < kTileRows) {
    std::memset(activations, 0, static_cast<size_t>(a.num_groups) * kTileRows * group);
    std::memset(scales, 0, static_cast<size_t>(a.num_groups) * kTileRows * 4);
    if constexpr (F::kHasMinimum) {
      std::memset(sums, 0, static_cast<size_t>(a.num_groups) * kTileRows * 4);
    }
  }
  const int8_t* codes[kTileRows];
  const float* row_scales[kTileRows];
  const int32_t* row_sums[kTileRows];
  for (int32_t r = 0; r < rows; ++r) {
    const int64_t from = int64_t{in_row(a, row + r)} * a.num_groups;
    codes[r] = a.codes + from * group;
    row_scales[r] = a.scales + from;
    row_sums[r] = a.sums + from;
  }
  for (int32_t g = 0; g < a.num_groups; ++g) {
    for (int32_t r = 0; r < rows; ++r) {
      std::memcpy(activations + r * group, codes[r] + g * group, group);
      scales[r] = row_scales[r][g];
      if constexpr (F::kHasMinimum) sums[r] = static_cast<float>(row_sums[r][g]);
    }
    activations += kTileRows * group;
    scales += kTileRows;
    sums += kTileRows;
  }
}

// Row tiles of a call with its blocks, chunk by chunk; chunk c is block c / chunks of a block.
template <class F, int group>
class TileProduct {
 public:
  // Rows [row, row + 16 num_tiles) of the call are in `work`.
  TileProduct(const LinearArgs& a, const TileWork<F, group>& work, int32_t num_tiles, int32_t row)
      : a_(a),
        work_(work),
        num_tiles_(num_tiles),
        row_(row),
        chunks_((a.num_groups + kChunkGroups - 1) / kChunkGroups) {}

  // A chunk is unpacked before the one ahead of it is multiplied: a tile load that found its bytes
  // still on their way from a store would wait.
  void run() const {
    const int64_t total = int64_t{a_.num_blocks} * chunks_;
    for (int64_t line = 0; line < bytes(0) + bytes(1); line += 64) prefetch(packed(0) + line);
    unpack(0);
    for (int64_t chunk = 0; chunk < total; ++chunk) {
      if (chunk + 1 < total) unpack(chunk + 1);
      multiply(chunk);
      if ((chunk + 1) % (kBlocksTogether * chunks_) == 0 || chunk + 1 == total) {
        store_results(static_cast<int32_t>(chunk / chunks_));
      }
    }
  }

 private:
  static constexpr int32_t kChunkGroups = TileWork<F, group>::kChunkGroups;

  int32_t first_group(int64_t chunk) const {
    return static_cast<int32_t>(chunk % chunks_) * kChunkGroups;
  }
  int32_t count(int64_t chunk) const {
    const int32_t left = a_.num_groups - first_group(chunk);
    return left < kChunkGroups ? left : kChunkGroups;
  }
  int8_t* weights(int64_t chunk) const {
    return work_.weights + chunk % 2 * kChunkInputs * kBlockOutputs;
  }
  float* output_scales(int64_t chunk) const {
    return work_.output_scales + chunk % 2 * kChunkGroups * kBlockOutputs;
  }
  float* output_minimums(int64_t chunk) const {
    return work_.output_minimums + chunk % 2 * kChunkGroups * kBlockOutputs;
  }

  // Where a chunk lies as it is stored, and how much there is of it.
  const unsigned char* packed(int64_t chunk) const {
    return reinterpret_cast<const unsigned char*>(a_.weights) + chunk / chunks_ * a_.block_bytes +
           bytes_of_groups<group>(F{}, first_group(chunk));
  }
  int64_t bytes(int64_t chunk) const { return bytes_of_groups<group>(F{}, count(chunk)); }

  void unpack(int64_t chunk) const {
    unpack_groups(F{}, packed(chunk), count(chunk), weights(chunk), output_scales(chunk),
                  output_minimums(chunk));
  }

  template <class Plain>
  static void unpack_groups(Plain, const unsigned char* p, int32_t count, int8_t* weights,
                            float* scales, float* minimums) {
    for (int32_t g = 0; g < count; ++g) {
      unpack_group<Plain, group>(p + g * kGroupBytes<Plain, group>,
                                 weights + g * group * kBlockOutputs, scales + g * kBlockOutputs,
                                 minimums + g * kBlockOutputs);
    }
  }
  template <class S>
  static void unpack_groups(TileSuper<S>, const unsigned char* p, int32_t count, int8_t* weights,
                            float* scales, float* minimums) {
    constexpr int32_t kGroups = S::kLayout.groups;
    static_assert(kChunkGroups % kGroups == 0);
    for (int32_t g = 0; g < count; g += kGroups) {
      const int32_t left = count - g;
      unpack_super_group<S>(p + g / kGroups * S::kLayout.nbytes, left < kGroups ? left : kGroups,
                            weights + g * group * kBlockOutputs, scales + g * kBlockOutputs,
                            minimums + g * kBlockOutputs);
    }
  }

  void multiply(int64_t chunk) const {
    const int64_t first = int64_t{first_group(chunk)} * kTileRows;
    multiply_tiles<F, group>({work_.activations + first * group, work_.row_scales + first,
                              work_.row_sums + first, weights(chunk), output_scales(chunk),
                              output_minimums(chunk), num_tiles_, a_.num_groups, count(chunk),
                              first == 0, packed(chunk + 2), bytes(chunk + 2), work_.sums,
                              work_.results + chunk / chunks_ % kBlocksTogether * kBlockOutputs});
  }

  // Of the blocks kept together, up to `last`.
  void store_results(int32_t last) const {
    const int32_t first = last - last % kBlocksTogether;
    const int32_t left = a_.num_rows - row_;
    const int32_t rows = left < num_tiles_ * kTileRows ? left : num_tiles_ * kTileRows;
    for (int32_t r = 0; r < rows; ++r) {
      for (int32_t block = first; block <= last; ++block) {
        store_outputs(a_, block, row_ + r,
                      load(work_.results + r * kResultStride + (block - first) * kBlockOutputs));
      }
    }
  }

  const LinearArgs& a_;
  const TileWork<F, group>& work_;
  int32_t num_tiles_, row_, chunks_;
};

template <class F, int group>
void multiply_rows(const LinearArgs& a) {
  const Tiles tiles(group);
  const int32_t num_tiles = (a.num_rows + kTileRows - 1) / kTileRows;
  const int64_t bytes_of_tile = int64_t{a.num_groups} * kTileRows * group;
  const int64_t most = kMaxActivationBytes / bytes_of_tile;
  const int32_t parts = most < 1 ? num_tiles : static_cast<int32_t>((num_tiles + most - 1) / most);
  const int32_t per_part = (num_tiles + parts - 1) / parts;
  const TileWork<F, group> work(per_part, a.num_groups);
  for (int32_t first = 0; first < num_tiles; first += per_part) {
    const int32_t count = num_tiles - first < per_part ? num_tiles - first : per_part;
    for (int32_t t = 0; t < count; ++t) {
      const int64_t at = int64_t{t} * a.num_groups * kTileRows;
      pack_rows<F, group>(a, (first + t) * kTileRows, work.activations + at * group,
                          work.row_scales + at, work.row_sums + at);
    }
    TileProduct<F, group>(a, work, count, first * kTileRows).run();
  }
}

// ---- tiles or vectors

// Rows that are worth a tile: its cost does not depend on how many of its rows are in use, that of
// vectors does. By measurement (docs/experiments.md, 2026-12-02): tiles won from 9 on with groups
// of 64, drew level at 12 with groups of 32, and at a whole tile with groups of 16.
inline constexpr int32_t least_tile_rows(int group) {
  return group == 64 ? 9 : group == 32 ? 12 : kTileRows;
}

inline LinearArgs rows_from(LinearArgs a, int32_t row) {
  if (a.in_rows != nullptr) {
    a.in_rows += row;
  } else {
    const int64_t from = int64_t{row} * a.num_groups;
    a.codes += from * a.group;
    a.scales += from;
    a.sums += from;
  }
  if (a.out_rows != nullptr) {
    a.out_rows += row;
  } else {
    a.out += row * a.out_stride;
  }
  a.num_rows -= row;
  return a;
}

template <class F, int group, Format format>
void tiles_or_vectors(const LinearArgs& a) {
  const int32_t rest = a.num_rows % kTileRows;
  LinearArgs by_tiles = a;
  if (rest < least_tile_rows(group)) by_tiles.num_rows -= rest;
  if (by_tiles.num_rows > 0) multiply_rows<F, group>(by_tiles);
  if (by_tiles.num_rows < a.num_rows) {
    avx512_table()->linear[static_cast<int>(format)](rows_from(a, by_tiles.num_rows));
  }
}

inline void linear_q8(const LinearArgs& a) { tiles_or_vectors<TileQ8, 32, Format::Q8>(a); }
inline void linear_mxfp4(const LinearArgs& a) { tiles_or_vectors<TileMxfp4, 32, Format::MXFP4>(a); }

// Nibbles with groups of 32 or 64.
template <class F, Format format>
void nibble_tiles(const LinearArgs& a) {
  if (a.group == 64) {
    tiles_or_vectors<F, 64, format>(a);
  } else {
    tiles_or_vectors<F, 32, format>(a);
  }
}

// Bytes with groups of 32 or 16.
template <class F, Format format>
void byte_tiles(const LinearArgs& a) {
  if (a.group == 32) {
    tiles_or_vectors<F, 32, format>(a);
  } else {
    tiles_or_vectors<F, 16, format>(a);
  }
}

inline void linear_q4(const LinearArgs& a) { nibble_tiles<TileQ4, Format::Q4>(a); }
inline void linear_q4f(const LinearArgs& a) { nibble_tiles<TileQ4f, Format::Q4F>(a); }
inline void linear_q4a(const LinearArgs& a) { nibble_tiles<TileQ4a, Format::Q4A>(a); }
inline void linear_q8f(const LinearArgs& a) { byte_tiles<TileQ8f, Format::Q8F>(a); }
inline void linear_q8a(const LinearArgs& a) { byte_tiles<TileQ8a, Format::Q8A>(a); }

template <class S, Format format>
void super_tiles(const LinearArgs& a) {
  tiles_or_vectors<TileSuper<S>, S::kGroup, format>(a);
}

// What the tile unit reaches with everything in tile registers (see kernels_peak.h).
inline int64_t peak_tiles(int64_t rounds, int32_t* sink) {
  const Tiles tiles(64);
  alignas(64) int8_t inputs[kTileBytes];
  std::memset(inputs, sink[0] & 1, kTileBytes);
  tile_load<kActivations, kTileBytes>(inputs, 64);
  tile_load<kWeights, kTileBytes>(inputs, 64);
  tile_zero<kSums>();
  for (int64_t round = 0; round < rounds; ++round) tile_dot<kSums, kActivations, kWeights>();
  alignas(64) int32_t sums[kTileBytes / 4];
  tile_store<kSums>(sums);
  sink[0] = sums[0];
  return rounds * kTileRows * kBlockOutputs * 64 * 2;
}

inline const KernelTable* make_table() {
  static const KernelTable table = [] {
    KernelTable t = *avx512_table();
    t.linear[static_cast<int>(Format::Q8)] = linear_q8;
    t.linear[static_cast<int>(Format::Q4)] = linear_q4;
    t.linear[static_cast<int>(Format::MXFP4)] = linear_mxfp4;
    t.linear[static_cast<int>(Format::Q8F)] = linear_q8f;
    t.linear[static_cast<int>(Format::Q8A)] = linear_q8a;
    t.linear[static_cast<int>(Format::Q4F)] = linear_q4f;
    t.linear[static_cast<int>(Format::Q4A)] = linear_q4a;
    t.linear[static_cast<int>(Format::Q2K)] = super_tiles<Q2k, Format::Q2K>;
    t.linear[static_cast<int>(Format::Q3K)] = super_tiles<Q3k, Format::Q3K>;
    t.linear[static_cast<int>(Format::Q4K)] = super_tiles<Q4k, Format::Q4K>;
    t.linear[static_cast<int>(Format::Q5K)] = super_tiles<Q5k, Format::Q5K>;
    t.linear[static_cast<int>(Format::Q6K)] = super_tiles<Q6k, Format::Q6K>;
    t.linear[static_cast<int>(Format::Q6KA)] = super_tiles<Q6ka, Format::Q6KA>;
    t.peak_int8 = peak_tiles;
    return t;
  }();
  return &table;
}

}  // namespace headrace::HEADRACE_ISA
