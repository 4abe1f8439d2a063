// GGUF blocks as codes, scales and minimums, and from there into the packed layouts of format.h.
// Every value is code * scale (+ minimum) with float32 scales that hold the file's exactly, so
// nothing is rounded. The NumPy twin is src/headrace/checkpoint/gguf_blocks.py.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/format.h"

namespace headrace {

// A block of 256 values whose scales are multiples of one number: what place_super_group takes of
// an output.
struct SuperBlock {
  uint8_t* codes;  // 256, from 0 on
  int8_t* multiples;
  int8_t* minimum_multiples;
  uint16_t unit, minimum_unit;  // float16
};

// How one tensor type stores values; `id` is the file's.
struct GgufType {
  int32_t id;
  int32_t block;   // values of a block
  int32_t nbytes;  // bytes of a block
  int32_t group;   // values that share a scale: 16 or 32
  // One block: `block` codes, and a scale and a minimum for each group. See `numbers`.
  void (*decode)(const uint8_t* source, uint8_t* codes, float* scales, float* minimums);
  Format tightest;  // the smallest format that holds the codes
  void (*split)(const uint8_t* source, SuperBlock& out);  // if that format has multiples
  // What codes of four bits stand for in formats of whole bytes; null: themselves.
  const int8_t* numbers = nullptr;
};

// Throws Error(UnsupportedModel) for a type without blocks or one that is not decoded here.
const GgufType& gguf_type(int32_t id);

// Throws Error(Shape) unless rows of `cols` values of the type can be laid out in `format` with
// `group` without loss.
void require_gguf(const GgufType& type, int32_t cols, Format format, int32_t group);

// Lays rows of blocks, one after the other, out as packed blocks of 16 outputs, the last one padded
// with zero rows; `cols` is a multiple of the type's block. Serial: reader threads call it. Returns
// -1, or the row-major index of the first value of a group whose scale is no finite number.
int64_t repack_gguf(const std::byte* source, const GgufType& type, int32_t rows, int32_t cols,
                    Format format, int32_t group, std::byte* packed);

}  // namespace headrace
