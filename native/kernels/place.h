// Laying integer codes with their scales out as format.h says: what a foreign checkpoint's blocks
// are decoded for. Nothing is rounded on the way.
#pragma once

#include <cstdint>

#include "kernels/format.h"

namespace headrace {

// Codes of the 16 outputs of a block, for some groups in a row.
struct CodeBand {
  // One byte each: q8, q8f and q8a -128..127, q4 and q4f -8..7, q4a 0..15, mxfp4 an e2m1 code of
  // four bits, f8 an e4m3 number. Nibbles beyond their range spoil their neighbours.
  const uint8_t* codes;
  int64_t code_stride;  // bytes from one output to the next
  // By output and group. q8 and q4 hold them as float16, mxfp4 as powers of two.
  const float* scales;
  const float* minimums;  // of the formats that have one, else null
  int64_t scale_stride;   // floats from one output to the next
};

// Fills num_groups groups of one block at `packed`. Serial: reader threads call it. Returns -1, or
// output * num_groups + group of the first scale or minimum that the format cannot hold exactly (a
// NaN or an infinity never, nor a scale of f8 from 2^119 on, nor an f8 group with a code of NaN);
// all bytes are written all the same.
int64_t place_groups(Format format, int32_t group, int32_t num_groups, const CodeBand& band,
                     std::byte* packed);

// Bytes k of sixteen outputs, `stride` bytes apart, become vector k of f8's layout; `group` is a
// multiple of 16.
void place_bytes(const uint8_t* codes, int64_t stride, int32_t group, uint8_t* packed);

// A super-group of the 16 outputs of a block, as formats with multiples hold it.
struct SuperBand {
  uint8_t codes[kBlockOutputs][kSuperInputs];  // from 0 on: the format's offset is in them
  // By group; some formats have 8 of them, and no minimums.
  int8_t multiples[kBlockOutputs][16];
  int8_t minimum_multiples[kBlockOutputs][16];
  uint16_t units[kBlockOutputs];  // float16
  uint16_t minimum_units[kBlockOutputs];
};

// Fills the super-group at `packed`. Serial. Returns -1, or the first output with a unit that is a
// NaN or an infinity; all bytes are written all the same.
int32_t place_super_group(Format format, int32_t group, const SuperBand& band, std::byte* packed);

}  // namespace headrace
