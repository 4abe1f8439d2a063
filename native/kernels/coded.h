// Matrices in codes as checkpoints of other tools store them: several tensors to a matrix, each of
// which is laid out on its own, in any order and in pieces, as the packed layouts of format.h say.
// Codes and scales have places of their own there, so that no tensor waits for another; only
// minimums are completed once all are there. Nothing is rounded but a scale that is the product of
// two numbers. The NumPy twin is src/headrace/checkpoint/hf_quantised.py.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/record_feed.h"
#include "kernels/format.h"

namespace headrace {

// What a tensor holds of a matrix [N, K] whose inputs share scales by groups: G of them.
enum class CodedKind : int32_t {
  NibblesByOutput,     // [N, K] codes of four bits, the lower half of a byte first
  NibblesByInput,      // [K / 8, N] words: eight inputs of an output, lowest bits first
  NibblesInterleaved,  // [K, N / 8] words: eight outputs of an input, in the order of AutoAWQ
  Bytes,               // [N, K] e4m3 numbers
  ScalesByOutput,      // [N, G]
  ScalesByGroup,       // [G, N]
  ScalesByTile,        // [N / group, K / group], a tile's last one may be cut off
  ZerosByOutput,       // [N / 8, G] words: eight outputs of a group, lowest bits first
  ZerosByGroup,        // [G, N / 8] words: the same
  ZerosInterleaved,    // [G, N / 8] words: in the order of AutoAWQ
  GroupOfInput,        // [K] int32: must be the input divided by the group
  ValuesByInput,       // [K, N] values of a floating format
};

// How gate and up stand in a tensor that holds both.
enum class GateUp : int32_t {
  RowsAlternate,     // of outputs: row 2j is gate's row j, row 2j + 1 is up's
  HalvesOfRow,       // of an input: gate's outputs, then up's
  ColumnsAlternate,  // of an input: output 2j is gate's output j, output 2j + 1 is up's
};

// How a scale is written in its file.
enum class ScaleType : int32_t { F32, F16, BF16, E8M0, E4M3 };

// The scale of NVFP4's groups is made of two numbers: their product, or the first by the second.
enum class ScaleFactor : int32_t { None, Multiplies, Divides };

struct CodedTensor {
  CodedKind kind;
  ScaleType type;
  ScaleFactor factor;
  int32_t group;        // inputs that share a scale in the file
  int32_t zero_offset;  // added to stored zeros
};

CodedKind parse_coded_kind(std::string_view name);  // these throw Error(Config)
ScaleType parse_scale_type(std::string_view name);
ScaleFactor parse_scale_factor(std::string_view name);

// How the tensor of a matrix stands in its file, as the rows that it is cut into.
struct CodedRows {
  int32_t rows;
  int64_t row_bytes;
  int32_t row_values;
  int32_t granule;  // rows that are laid out together: a piece begins at a multiple of it
};

// Throws Error(Shape) unless the tensor's content fits the matrix' format, group and size.
CodedRows coded_rows(const CodedTensor& tensor, const ExpertMatrix& matrix);

// Lays `count` rows from row `first` on out in the packed matrix. Serial: reader threads call it,
// several at a time for different pieces. Returns -1, or the index within these rows of the first
// value that cannot be taken: a scale that is no finite number or that the format does not hold, a
// code of NaN, a group that is not the input's. All else is written all the same.
int64_t place_coded(const std::byte* source, const CodedTensor& tensor, float factor,
                    const ExpertMatrix& matrix, int32_t first, int32_t count, std::byte* packed);

// The same for a tensor of gate and up, whose matrices are alike. The index of a bad value and the
// rows, `first` and `count`, are the tensor's own.
// Which of them holds the value at a row-major index of the tensor: 0 gate, 1 up.
int32_t gate_up_at(GateUp split, int32_t row_values, int64_t index);
CodedRows gate_up_rows(const CodedTensor& tensor, GateUp split, const ExpertMatrix& matrix);
int64_t place_gate_up(const std::byte* source, const CodedTensor& tensor, GateUp split,
                      float factor, const ExpertMatrix& matrix, int32_t first, int32_t count,
                      std::byte* gate, std::byte* up);

// Makes minimums of the zeros, in formats that have them, once all of a matrix is placed.
void finish_coded(const ExpertMatrix& matrix, std::byte* packed);

}  // namespace headrace
