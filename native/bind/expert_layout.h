// The layout of an expert's record as Python gives it, checked: kernels read what it says.
#pragma once

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <cstdint>
#include <string>
#include <tuple>

#include "base/record_feed.h"
#include "bind/arrays.h"
#include "kernels/format.h"

namespace headrace {

// Format, rows, cols, group, offset.
using MatrixTuple = std::tuple<std::string, int32_t, int32_t, int32_t, int64_t>;

inline ExpertMatrix expert_matrix(const MatrixTuple& from, int64_t record_bytes, const char* op,
                                  const char* name) {
  const auto& [format_name, rows, cols, group, offset] = from;
  const Format format = parse_format(format_name);
  const ExpertMatrix matrix{format, rows, cols, checked_group(format, group), offset};
  if (rows < 1 || cols < 1) {
    throw Error(ErrorKind::Shape, std::string(op) + ": matrix `" + name + "` has no rows or cols");
  }
  require_countable(op, {rows, cols});
  const int64_t size = packed_bytes(format, rows, cols, matrix.group);
  if (offset < 0 || offset % 64 != 0 || size > record_bytes || offset > record_bytes - size) {
    throw Error(ErrorKind::Shape, std::string(op) + ": matrix `" + name +
                                      "` does not lie in its record of " +
                                      std::to_string(record_bytes) + " bytes at a multiple of 64");
  }
  return matrix;
}

inline ExpertLayout expert_layout(const MatrixTuple& gate, const MatrixTuple& up,
                                  const MatrixTuple& down, int64_t record_bytes, const char* op) {
  return {expert_matrix(gate, record_bytes, op, "gate"), expert_matrix(up, record_bytes, op, "up"),
          expert_matrix(down, record_bytes, op, "down"), record_bytes};
}

}  // namespace headrace
