// The packed weight formats: the one definition of their layout. Readers in other places ask here.
//
// A linear W is [rows = outputs, cols = inputs]. Outputs come in blocks of 16 (padded with zero
// rows); a block is its groups in ascending order; a group is contiguous:
//   q8     g/4 vectors of 64 bytes, vector j = inputs 4j..4j+3 of 16 outputs, byte [output*4 + i]
//   an int8
//          code; then 16 float16 scales. (One vector is what a 4-way int8 dot instruction
//          multiplies.)
//   q4     g/8 vectors of 64 bytes, byte b of vector j = (code b of q8's vector 2j) + 8 in the low
//   nibble
//          and of vector 2j+1 in the high nibble; then 16 float16 scales. Codes -8..7.
//   mxfp4  nibbles placed as in q4, holding e2m1 values (bit 3 is the sign); then 16 E8M0 scales.
//   q8f    codes as in q8, -128..127; then 16 float32 scales.
//   q8a    the same; then 16 float32 minimums: the weight is code * scale + minimum.
//   q4f    nibbles as in q4, code + 8; then 16 float32 scales.
//   q4a    nibbles placed as in q4, holding codes 0..15; then 16 float32 scales and 16 minimums.
//   f8     g vectors of 16 bytes, vector k = input k of 16 outputs, each an e4m3 number (without
//          infinities); then 16 float32 scales. A floating format: see e4m3_times in
//          small_float.h.
//   bf16, f16, f32   a "group" is one input: its 16 outputs.
// Inputs of a group are padded to a multiple of g with zero codes.
//   q2k, q3k, q4k, q5k, q6k, q6ka   scales of two levels: a block is super-groups of 256 inputs,
//   the last
//          one padded. See SuperLayout.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/record_feed.h"

namespace headrace {

inline constexpr int32_t kBlockOutputs = 16;
inline constexpr int32_t kNumFormats = 17;

// Whether products with the format quantise their inputs, too.
inline bool is_quantised(Format format) { return format >= Format::Q8 && format != Format::F8; }

// Whether groups of inputs share a scale.
inline bool has_groups(Format format) { return format >= Format::Q8; }

// Whether two codes share a byte.
inline bool is_nibbles(Format format) {
  return format == Format::Q4 || format == Format::MXFP4 || format == Format::Q4F ||
         format == Format::Q4A;
}

// Whether a scale is a float16 unit of 256 inputs times an int8 multiple of its group.
inline bool has_multiples(Format format) { return format >= Format::Q2K; }

// How a format with multiples holds codes: their low and high bits apart, and what is subtracted.
struct CodePlanes {
  int32_t low_bits, high_bits;
  int32_t offset;
  bool has_minimum;
};

constexpr CodePlanes code_planes(Format format) {
  switch (format) {
    case Format::Q2K:
      return {2, 0, 0, true};
    case Format::Q3K:
      return {2, 1, 4, false};
    case Format::Q4K:
      return {4, 0, 0, true};
    case Format::Q5K:
      return {4, 1, 0, true};
    case Format::Q6K:
      return {4, 2, 32, false};
    default:  // q6ka, which holds every other of them
      return {4, 2, 32, true};
  }
}

inline bool has_minimum(Format format) {
  return format == Format::Q8A || format == Format::Q4A ||
         (has_multiples(format) && code_planes(format).has_minimum);
}

inline constexpr int32_t kSuperInputs = 256;

// Where the parts of a super-group lie, from its start: 16 float16 units of scales; 16 of minimums
// (zero in formats without); for every group 16 int8 multiples of scales; then those of minimums;
// then the low bits of all codes, then the high ones. Let q8's vectors be numbered j, 0..63. A
// plane of b bits has 64 b / 8 vectors of 64 bytes, of which each byte holds the bits of the same
// byte of 8 / b vectors j, the first of them lowest. Weight = (code - offset) * scale + minimum,
// where scale = unit * multiple, which float32 holds exactly.
struct SuperLayout {
  int32_t groups;
  int32_t minimum_units, multiples, minimum_multiples, low, high;
  int32_t nbytes;  // a multiple of 64
};

constexpr SuperLayout super_layout(Format format, int32_t group) {
  const CodePlanes planes = code_planes(format);
  SuperLayout layout{};
  layout.groups = kSuperInputs / group;
  layout.minimum_units = 32;
  layout.multiples = 64;
  layout.minimum_multiples = layout.multiples + layout.groups * 16;
  layout.low = layout.multiples + layout.groups * (planes.has_minimum ? 32 : 16);
  layout.high = layout.low + kSuperInputs * 2 * planes.low_bits;
  layout.nbytes = layout.high + kSuperInputs * 2 * planes.high_bits;
  return layout;
}

const char* format_name(Format format);
Format parse_format(std::string_view name);  // throws Error(Config)

// The group that a format uses when asked for `group`; throws Error(Config) if it has none such.
// The plain floating formats always have 1.
int32_t checked_group(Format format, int32_t group);

// Of the codes of a group, which its scales follow; not of formats with multiples.
int64_t code_bytes(Format format, int32_t group);
int64_t group_bytes(Format format, int32_t group);
int64_t num_groups(int32_t cols, int32_t group);
int64_t num_blocks(int32_t rows);
int64_t block_bytes(Format format, int32_t cols, int32_t group);
int64_t packed_bytes(Format format, int32_t rows, int32_t cols, int32_t group);

// A packed matrix somewhere in memory, at a multiple of 64 bytes.
struct MatrixView {
  const std::byte* data = nullptr;
  Format format = Format::F32;
  int32_t rows = 0;
  int32_t cols = 0;
  int32_t group = 1;

  static MatrixView of(const ExpertMatrix& matrix, const std::byte* record) {
    return {record + matrix.offset, matrix.format, matrix.rows, matrix.cols, matrix.group};
  }
  int64_t num_blocks() const { return headrace::num_blocks(rows); }
  int64_t num_groups() const { return headrace::num_groups(cols, group); }
  int64_t block_bytes() const { return headrace::block_bytes(format, cols, group); }
  int64_t nbytes() const { return packed_bytes(format, rows, cols, group); }
};

}  // namespace headrace
