// Packing of row-major weights into the layouts of format.h, and back.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "base/thread_pool.h"
#include "kernels/format.h"

namespace headrace {

// Row-major weights in a floating format (F32, F16 or BF16).
struct RowMajor {
  const std::byte* data;
  Format dtype;
  int32_t rows, cols;
};

// Quantises to q8, q4 or mxfp4; a plain floating target is a conversion with rounding to nearest
// even, exact when the types agree. `name` goes into error messages. Throws Error(Checkpoint) for a
// NaN or infinite weight or one whose scale does not fit, Error(Config) for another format: those
// hold codes that came from elsewhere (pack_codes).
void pack(ThreadPool& pool, const RowMajor& source, Format format, int32_t group,
          const std::string& name, std::byte* packed);

// Codes as CodeBand has them with the numbers that they are multiplied by, row-major.
struct RowMajorCodes {
  const uint8_t* codes;   // [rows, cols]
  const float* scales;    // [rows, num_groups(cols, group)]
  const float* minimums;  // the same; null unless the format has minimums
  int32_t rows, cols;
};

// Lays codes out; nothing is rounded. `name` goes into error messages. Throws Error(Checkpoint) for
// a code or a scale that the format does not hold.
void pack_codes(ThreadPool& pool, const RowMajorCodes& source, Format format, int32_t group,
                const std::string& name, std::byte* packed);

// The real values of a packed matrix: [rows, cols] float32.
void unpack(ThreadPool& pool, const MatrixView& matrix, float* values);
// The real values of one output: [cols] float32.
void unpack_row(const MatrixView& matrix, int32_t row, float* values);

// Row-major to 16-interleaved in the same floating type, bytes unchanged; fills
// packed_bytes(dtype, rows, cols, 1) bytes. Serial: reader threads call it.
// Returns the row-major index of the first NaN or infinity, or -1; it is copied all the same.
int64_t interleave_rows(const std::byte* source, Format dtype, int32_t rows, int32_t cols,
                        std::byte* packed);

}  // namespace headrace
