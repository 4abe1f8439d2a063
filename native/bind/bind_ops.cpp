// Packed matrices, kernels and threads as Python sees them. Checks arguments, drops the GIL, calls.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "base/array_pool.h"
#include "base/cpu.h"
#include "base/error.h"
#include "base/first_index.h"
#include "base/record_feed.h"
#include "base/thread_pool.h"
#include "bind/arrays.h"
#include "bind/bind.h"
#include "bind/expert_layout.h"
#include "io/memory.h"
#include "kernels/format.h"
#include "kernels/gguf_blocks.h"
#include "kernels/kernel_table.h"
#include "kernels/linear.h"
#include "kernels/memory_feed.h"
#include "kernels/moe.h"
#include "kernels/pack.h"
#include "kernels/quantise.h"
#include "kernels/router.h"
#include "kernels/sample.h"

namespace headrace {
namespace {

using namespace nb::literals;

[[noreturn]] void throw_shape(const std::string& message) {
  throw Error(ErrorKind::Shape, message);
}

// ---- packed matrices

// Keeps the array of packed bytes alive.
struct PackedMatrix {
  AnyArray owner;
  MatrixView view;
};

PackedMatrix make_matrix(AnyArray data, const std::string& format_name, int64_t rows, int64_t cols,
                         int64_t group) {
  MatrixView view;
  view.format = parse_format(format_name);
  view.rows = narrow(rows, "Matrix", "rows");
  view.cols = narrow(cols, "Matrix", "cols");
  view.group = checked_group(view.format, narrow(group, "Matrix", "group"));
  if (rows < 1 || cols < 1) throw_shape("Matrix: rows and cols must be at least 1");
  require_countable("Matrix", {rows, cols});
  view.data =
      reinterpret_cast<const std::byte*>(checked<uint8_t>(data, "Matrix", "data", {view.nbytes()}));
  if (reinterpret_cast<uintptr_t>(view.data) % 64 != 0) {
    throw_array("Matrix", "data", "an address that is a multiple of 64", "another");
  }
  return {std::move(data), view};
}

NumpyArray<float> unpack_matrix(const PackedMatrix& matrix) {
  Result<float> out({matrix.view.rows, matrix.view.cols});
  {
    nb::gil_scoped_release release;
    unpack(*shared_pool(), matrix.view, out.data);
  }
  return out.array();
}

int64_t packed_bytes_of(const std::string& format_name, int64_t rows, int64_t cols, int64_t group) {
  const Format format = parse_format(format_name);
  const int32_t g = checked_group(format, narrow(group, "packed_bytes", "group"));
  require_countable("packed_bytes", {rows, cols});
  return packed_bytes(format, narrow(rows, "packed_bytes", "rows"),
                      narrow(cols, "packed_bytes", "cols"), g);
}

Format weight_dtype(const AnyArray& array, const char* op, const char* name) {
  if (array.dtype() == nb::dtype<float>()) return Format::F32;
  if (array.dtype() == nb::dtype<uint16_t>()) return Format::BF16;
  if (array.dtype() ==
      nb::dlpack::dtype{static_cast<uint8_t>(nb::dlpack::dtype_code::Float), 16, 1}) {
    return Format::F16;
  }
  throw_array(op, name, "dtype float32, float16, or uint16 holding bfloat16", "another dtype");
}

RowMajor row_major(const AnyArray& w, const char* op, const char* name) {
  const Format dtype = weight_dtype(w, op, name);
  if (w.ndim() != 2 || w.shape(0) < 1 || w.shape(1) < 1) {
    throw_array(op, name, "shape [at least 1, at least 1]", shape_text(w));
  }
  if (!is_contiguous(w)) throw_array(op, name, "C order without gaps", "other strides");
  return {static_cast<const std::byte*>(w.data()), dtype,
          narrow(static_cast<int64_t>(w.shape(0)), op, "rows"),
          narrow(static_cast<int64_t>(w.shape(1)), op, "cols")};
}

NumpyArray<uint8_t> aligned_empty(int64_t num_bytes) {
  if (num_bytes < 0) throw_shape("aligned_empty: negative size " + std::to_string(num_bytes));
  auto memory = std::make_unique<io::PageBuffer>(num_bytes);
  auto* bytes = reinterpret_cast<uint8_t*>(memory->data());
  nb::capsule owner(memory.get(), [](void* p) noexcept { delete static_cast<io::PageBuffer*>(p); });
  memory.release();  // the capsule's now
  const size_t shape[1] = {static_cast<size_t>(num_bytes)};
  return NumpyArray<uint8_t>(bytes, 1, shape, owner);
}

NumpyArray<uint8_t> pack_weights(const AnyArray& w, const std::string& format_name, int64_t group,
                                 const std::string& name) {
  const RowMajor source = row_major(w, "pack", "w");
  const Format format = parse_format(format_name);
  const int32_t g = checked_group(format, narrow(group, "pack", "group"));
  NumpyArray<uint8_t> packed = aligned_empty(packed_bytes(format, source.rows, source.cols, g));
  {
    nb::gil_scoped_release release;
    pack(*shared_pool(), source, format, g, name, reinterpret_cast<std::byte*>(packed.data()));
  }
  return packed;
}

nb::tuple quantise_weights(const AnyArray& w, const std::string& format_name, int64_t group,
                           const std::optional<AnyArray>& importance, const std::string& name) {
  const RowMajor source = row_major(w, "quantise", "w");
  const Format format = parse_format(format_name);
  const int32_t g = checked_group(format, narrow(group, "quantise", "group"));
  const float* counts =
      importance ? checked<float>(*importance, "quantise", "importance", {source.cols}) : nullptr;
  NumpyArray<uint8_t> packed = aligned_empty(packed_bytes(format, source.rows, source.cols, g));
  QuantiseLoss loss;
  {
    nb::gil_scoped_release release;
    loss = quantise(*shared_pool(), source, format, g, counts, name,
                    reinterpret_cast<std::byte*>(packed.data()));
  }
  return nb::make_tuple(packed, loss.squared_error, loss.squares);
}

// Codes of one byte, signed or not: the format says how they are read.
const uint8_t* codes_of(const AnyArray& codes, const char* op) {
  if (codes.dtype() != nb::dtype<int8_t>() && codes.dtype() != nb::dtype<uint8_t>()) {
    throw_array(op, "codes", "dtype int8 or uint8", "another dtype");
  }
  if (codes.ndim() != 2 || codes.shape(0) < 1 || codes.shape(1) < 1) {
    throw_array(op, "codes", "shape [at least 1, at least 1]", shape_text(codes));
  }
  if (!is_contiguous(codes)) throw_array(op, "codes", "C order without gaps", "other strides");
  return static_cast<const uint8_t*>(codes.data());
}

NumpyArray<uint8_t> pack_code_arrays(const AnyArray& codes, const AnyArray& scales,
                                     const std::optional<AnyArray>& minimums,
                                     const std::string& format_name, int64_t group,
                                     const std::string& name) {
  RowMajorCodes source{};
  source.codes = codes_of(codes, "pack_codes");
  source.rows = narrow(static_cast<int64_t>(codes.shape(0)), "pack_codes", "rows");
  source.cols = narrow(static_cast<int64_t>(codes.shape(1)), "pack_codes", "cols");
  const Format format = parse_format(format_name);
  const int32_t g = checked_group(format, narrow(group, "pack_codes", "group"));
  const int64_t groups = num_groups(source.cols, g);
  source.scales = checked<float>(scales, "pack_codes", "scales", {source.rows, groups});
  if (minimums.has_value() != has_minimum(format)) {
    throw_array("pack_codes", "minimums", has_minimum(format) ? "an array" : "none",
                has_minimum(format) ? "none" : "an array");
  }
  if (minimums) {
    source.minimums = checked<float>(*minimums, "pack_codes", "minimums", {source.rows, groups});
  }
  NumpyArray<uint8_t> packed = aligned_empty(packed_bytes(format, source.rows, source.cols, g));
  {
    nb::gil_scoped_release release;
    pack_codes(*shared_pool(), source, format, g, name,
               reinterpret_cast<std::byte*>(packed.data()));
  }
  return packed;
}

// Rows of GGUF blocks, packed: reader threads do the same for experts.
void repack_gguf_rows(
    const nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>& rows,
    int32_t type_id, int64_t num_cols, const std::string& format_name, int64_t group,
    const nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>& packed,
    const std::string& name) {
  const GgufType& type = gguf_type(type_id);
  const Format format = parse_format(format_name);
  const int32_t cols = narrow(num_cols, "repack_gguf", "cols");
  const int32_t num_rows = narrow(static_cast<int64_t>(rows.shape(0)), "repack_gguf", "rows");
  const int32_t g = checked_group(format, narrow(group, "repack_gguf", "group"));
  require_gguf(type, cols, format, g);
  require_countable("repack_gguf", {num_rows, cols});
  const int64_t row_bytes = int64_t{cols} / type.block * type.nbytes;
  if (static_cast<int64_t>(rows.shape(1)) != row_bytes) {
    throw_shape("repack_gguf: expected rows of " + std::to_string(row_bytes) + " bytes, got " +
                std::to_string(rows.shape(1)));
  }
  const int64_t size = packed_bytes(format, num_rows, cols, g);
  if (static_cast<int64_t>(packed.size()) != size) {
    throw_shape("repack_gguf: expected " + std::to_string(size) + " bytes to fill, got " +
                std::to_string(packed.size()));
  }
  const auto* source = reinterpret_cast<const std::byte*>(rows.data());
  auto* dest = reinterpret_cast<std::byte*>(packed.data());
  FirstIndex first_bad;
  {
    nb::gil_scoped_release release;
    shared_pool()->run(num_blocks(num_rows), [&](int64_t block) {
      const int64_t first = block * kBlockOutputs;
      const int32_t count =
          static_cast<int32_t>(std::min<int64_t>(kBlockOutputs, num_rows - first));
      const int64_t bad = repack_gguf(source + first * row_bytes, type, count, cols, format, g,
                                      dest + block * block_bytes(format, cols, g));
      if (bad >= 0) first_bad.report(first * cols + bad);
    });
  }
  if (const int64_t bad = first_bad.get(); bad != FirstIndex::kNone) {
    throw Error(ErrorKind::Checkpoint, "weight is not finite: tensor " + name + ", index [" +
                                           std::to_string(bad / cols) + ", " +
                                           std::to_string(bad % cols) +
                                           "]\nexpected finite scales only, got a NaN or infinity");
  }
}

void bind_matrices(nb::module_& m) {
  nb::class_<PackedMatrix>(m, "Matrix")
      .def(
          "__init__",
          [](PackedMatrix* self, AnyArray data, const std::string& format, int64_t rows,
             int64_t cols, int64_t group) {
            new (self) PackedMatrix(make_matrix(std::move(data), format, rows, cols, group));
          },
          "data"_a, "format"_a, "rows"_a, "cols"_a, "group"_a = 1)
      .def_prop_ro("data",
                   [](nb::handle self) {
                     const auto& matrix = nb::cast<const PackedMatrix&>(self);
                     const size_t shape[1] = {static_cast<size_t>(matrix.view.nbytes())};
                     return nb::ndarray<nb::numpy, const uint8_t>(
                         reinterpret_cast<const uint8_t*>(matrix.view.data), 1, shape, self);
                   })
      .def_prop_ro("rows", [](const PackedMatrix& m) { return m.view.rows; })
      .def_prop_ro("cols", [](const PackedMatrix& m) { return m.view.cols; })
      .def_prop_ro("format", [](const PackedMatrix& m) { return format_name(m.view.format); })
      .def_prop_ro("group", [](const PackedMatrix& m) { return m.view.group; })
      .def_prop_ro("nbytes", [](const PackedMatrix& m) { return m.view.nbytes(); });
  m.def("packed_bytes", packed_bytes_of, "format"_a, "rows"_a, "cols"_a, "group"_a = 1);
  m.def("pack", pack_weights, "w"_a, "format"_a, "group"_a = 1, "name"_a = "");
  m.def("quantise", quantise_weights, "w"_a, "format"_a, "group"_a, "importance"_a = nb::none(),
        "name"_a = "");
  m.def("pack_codes", pack_code_arrays, "codes"_a, "scales"_a, "minimums"_a.none(), "format"_a,
        "group"_a, "name"_a = "");
  m.def("repack_gguf", repack_gguf_rows, "rows"_a.noconvert(), "type"_a, "cols"_a, "format"_a,
        "group"_a, "packed"_a.noconvert(), "name"_a = "");
  m.def("unpack", unpack_matrix, "matrix"_a);
  m.def("aligned_empty", aligned_empty, "num_bytes"_a);
}

// ---- embedding

NumpyArray<float> embedding_packed(const AnyArray& ids, const PackedMatrix& table) {
  const int64_t count = static_cast<int64_t>(ids.ndim() == 1 ? ids.shape(0) : 0);
  const int32_t* id = checked<int32_t>(ids, "embedding", "ids", {kAnySize});
  for (int64_t t = 0; t < count; ++t) {
    if (id[t] < 0 || id[t] >= table.view.rows) {
      throw_shape("embedding: id " + std::to_string(id[t]) + " of token " + std::to_string(t) +
                  "\nexpected 0 to " + std::to_string(table.view.rows - 1));
    }
  }
  Result<float> out({count, table.view.cols});
  {
    nb::gil_scoped_release release;
    shared_pool()->run_ranges(count, 1, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        unpack_row(table.view, id[t], out.data + t * table.view.cols);
      }
    });
  }
  return out.array();
}

NumpyArray<float> embedding_rows(const AnyArray& ids, const AnyArray& table) {
  const RowMajor rows = row_major(table, "embedding", "table");
  const int64_t count = static_cast<int64_t>(ids.ndim() == 1 ? ids.shape(0) : 0);
  const int32_t* id = checked<int32_t>(ids, "embedding", "ids", {kAnySize});
  const int64_t row_bytes = int64_t{rows.cols} * (rows.dtype == Format::F32 ? 4 : 2);
  for (int64_t t = 0; t < count; ++t) {
    if (id[t] < 0 || id[t] >= rows.rows) {
      throw_shape("embedding: id " + std::to_string(id[t]) + " of token " + std::to_string(t) +
                  "\nexpected 0 to " + std::to_string(rows.rows - 1));
    }
  }
  Result<float> out({count, rows.cols});
  {
    nb::gil_scoped_release release;
    const KernelTable& table_of = kernels();
    for (int64_t t = 0; t < count; ++t) {
      table_of.widen(rows.dtype, rows.data + id[t] * row_bytes, rows.cols,
                     out.data + t * rows.cols);
    }
  }
  return out.array();
}

// ---- row by row

// x [R, D] and what to do with each row.
struct Rows {
  const float* x;
  int64_t count, width;
};

Rows rows_of(const AnyArray& x, const char* op, const char* name) {
  const float* data = checked<float>(x, op, name, {kAnySize, kAnySize});
  return {data, static_cast<int64_t>(x.shape(0)), static_cast<int64_t>(x.shape(1))};
}

struct RootMeanSquare {
  const float* weight;
  float eps;
  int32_t width;

  RootMeanSquare(const Rows& rows, const AnyArray& w, float e, const char* op)
      : weight(checked<float>(w, op, "weight", {rows.width})),
        eps(e),
        width(narrow(rows.width, op, "width")) {}

  void run(const Rows& rows, float* out) const {
    const KernelTable& table = kernels();
    shared_pool()->run_ranges(rows.count, std::max<int64_t>(1, 16384 / (rows.width + 1)),
                              [&](int64_t begin, int64_t end) {
                                for (int64_t r = begin; r < end; ++r) {
                                  table.rms_norm_row(rows.x + r * rows.width, weight, eps, width,
                                                     out + r * rows.width);
                                }
                              });
  }
};

NumpyArray<float> rms_norm(const AnyArray& x, const AnyArray& weight, float eps) {
  const Rows rows = rows_of(x, "rms_norm", "x");
  const RootMeanSquare norm(rows, weight, eps, "rms_norm");
  Result<float> out({rows.count, rows.width});
  {
    nb::gil_scoped_release release;
    norm.run(rows, out.data);
  }
  return out.array();
}

template <class F>
NumpyArray<float> elementwise(const AnyArray& x, const char* op, F kernel) {
  if (x.ndim() < 1 || x.ndim() > 4) throw_array(op, "x", "1 to 4 dimensions", shape_text(x));
  if (x.dtype() != nb::dtype<float>()) throw_array(op, "x", "dtype float32", "another dtype");
  if (!is_contiguous(x)) throw_array(op, "x", "C order without gaps", "other strides");
  Result<float> out({static_cast<int64_t>(x.size())});
  out.ndim = x.ndim();
  for (size_t i = 0; i < x.ndim(); ++i) out.shape[i] = x.shape(i);
  {
    nb::gil_scoped_release release;
    shared_pool()->run_ranges(static_cast<int64_t>(x.size()), 32768,
                              [&](int64_t begin, int64_t end) {
                                kernel(static_cast<const float*>(x.data()), begin, end, out.data);
                              });
  }
  return out.array();
}

NumpyArray<float> add_arrays(const AnyArray& x, const AnyArray& y) {
  bool is_same = x.ndim() == y.ndim() && y.dtype() == nb::dtype<float>() && is_contiguous(y);
  for (size_t i = 0; is_same && i < x.ndim(); ++i) is_same = x.shape(i) == y.shape(i);
  if (!is_same)
    throw_array("add", "y", "float32 in C order of shape " + shape_text(x), shape_text(y));
  const KernelTable& table = kernels();
  const float* second = static_cast<const float*>(y.data());
  return elementwise(x, "add", [&](const float* a, int64_t begin, int64_t end, float* out) {
    table.add(a + begin, second + begin, end - begin, out + begin);
  });
}

NumpyArray<float> clamp_array(const AnyArray& x, float limit) {
  if (!(limit > 0.0f)) throw_shape("clamp: limit must be above 0, got " + std::to_string(limit));
  const KernelTable& table = kernels();
  return elementwise(x, "clamp", [&](const float* a, int64_t begin, int64_t end, float* out) {
    table.clamp(a + begin, limit, end - begin, out + begin);
  });
}

// ---- products

void check_input(const char* op, const Rows& rows, const MatrixView& w) {
  if (rows.width == w.cols) return;
  throw_shape(std::string(op) + ": array `x`\nexpected " + std::to_string(w.cols) +
              " inputs per row, got " + std::to_string(rows.width));
}

NumpyArray<float> linear_op(const AnyArray& x, const PackedMatrix& w) {
  const Rows rows = rows_of(x, "linear", "x");
  check_input("linear", rows, w.view);
  Result<float> out({rows.count, w.view.rows});
  {
    nb::gil_scoped_release release;
    float* const outs[1] = {out.data};
    linears(*shared_pool(), rows.x, narrow(rows.count, "linear", "rows"), std::span(&w.view, 1),
            outs, "linear");
  }
  return out.array();
}

// The products of one input with several matrices.
struct Products {
  Products(const char* name, const Rows& rows, const std::vector<const PackedMatrix*>& matrices)
      : op(name), num_rows(narrow(rows.count, name, "rows")) {
    for (const PackedMatrix* w : matrices) {
      check_input(op, rows, w->view);
      views.push_back(w->view);
      results.push_back(
          std::unique_ptr<Result<float>>(new Result<float>({rows.count, w->view.rows})));
      outs.push_back(results.back()->data);
    }
  }

  void run(const float* x) const { linears(*shared_pool(), x, num_rows, views, outs, op); }

  nb::tuple arrays() const {
    nb::list list;
    for (const auto& result : results) list.append(result->array());
    return nb::tuple(list);
  }

  const char* op;
  int32_t num_rows;
  std::vector<MatrixView> views;
  std::vector<std::unique_ptr<Result<float>>> results;
  std::vector<float*> outs;
};

nb::tuple linears_op(const AnyArray& x, const std::vector<const PackedMatrix*>& matrices) {
  const Rows rows = rows_of(x, "linears", "x");
  const Products products("linears", rows, matrices);
  {
    nb::gil_scoped_release release;
    products.run(rows.x);
  }
  return products.arrays();
}

nb::tuple norm_linears_op(const AnyArray& x, const AnyArray& weight, float eps,
                          const std::vector<const PackedMatrix*>& matrices) {
  const Rows rows = rows_of(x, "norm_linears", "x");
  const RootMeanSquare norm(rows, weight, eps, "norm_linears");
  const Products products("norm_linears", rows, matrices);
  {
    nb::gil_scoped_release release;
    PoolBuffer<float> normed(rows.count * rows.width);
    norm.run(rows, normed.get());
    products.run(normed.get());
  }
  return products.arrays();
}

NumpyArray<float> linear_add_op(const AnyArray& x, const PackedMatrix& w, const AnyArray& y) {
  const Rows rows = rows_of(x, "linear_add", "x");
  check_input("linear_add", rows, w.view);
  const float* added = checked<float>(y, "linear_add", "y", {rows.count, w.view.rows});
  Result<float> out({rows.count, w.view.rows});
  {
    nb::gil_scoped_release release;
    float* const outs[1] = {out.data};
    linears(*shared_pool(), rows.x, narrow(rows.count, "linear_add", "rows"), std::span(&w.view, 1),
            outs, "linear_add");
    const KernelTable& table = kernels();
    shared_pool()->run_ranges(rows.count * w.view.rows, 32768, [&](int64_t begin, int64_t end) {
      table.add(added + begin, out.data + begin, end - begin, out.data + begin);
    });
  }
  return out.array();
}

void check_ffn(const char* op, const Rows& rows, const MatrixView& gate, const MatrixView& up,
               const MatrixView& down) {
  check_input(op, rows, gate);
  check_input(op, rows, up);
  if (gate.rows != up.rows || down.cols != gate.rows) {
    throw_shape(std::string(op) + ": gate and up must have as many outputs as down has inputs\n" +
                "gate " + std::to_string(gate.rows) + ", up " + std::to_string(up.rows) +
                ", down " + std::to_string(down.cols));
  }
}

NumpyArray<float> swiglu_op(const AnyArray& x, const PackedMatrix& gate, const PackedMatrix& up,
                            const PackedMatrix& down) {
  const Rows rows = rows_of(x, "swiglu_ffn", "x");
  check_ffn("swiglu_ffn", rows, gate.view, up.view, down.view);
  Result<float> out({rows.count, down.view.rows});
  {
    nb::gil_scoped_release release;
    swiglu_ffn(*shared_pool(), rows.x, narrow(rows.count, "swiglu_ffn", "rows"), gate.view, up.view,
               down.view, out.data);
  }
  return out.array();
}

void check_experts(const char* op, const Rows& rows, const ExpertLayout& layout) {
  check_ffn(op, rows, MatrixView::of(layout.gate, nullptr), MatrixView::of(layout.up, nullptr),
            MatrixView::of(layout.down, nullptr));
  if (layout.down.rows != rows.width) {
    throw_shape(std::string(op) + ": experts do not return the width of x");
  }
}

RoutedTokens routed_tokens(const Rows& rows, const AnyArray& ids, const AnyArray& weights,
                           RecordFeed& feed) {
  RoutedTokens tokens{};
  tokens.ids = checked<int32_t>(ids, "moe_ffn", "ids", {rows.count, kAnySize});
  tokens.num_chosen = narrow(static_cast<int64_t>(ids.shape(1)), "moe_ffn", "experts per token");
  tokens.weights = checked<float>(weights, "moe_ffn", "weights", {rows.count, tokens.num_chosen});
  tokens.x = rows.x;
  tokens.num_tokens = narrow(rows.count, "moe_ffn", "tokens");
  tokens.hidden = narrow(rows.width, "moe_ffn", "width");
  check_experts("moe_ffn", rows, feed.layout());
  return tokens;
}

NumpyArray<float> moe_op(const AnyArray& x, const AnyArray& ids, const AnyArray& weights,
                         RecordFeed& feed) {
  const Rows rows = rows_of(x, "moe_ffn", "x");
  const RoutedTokens tokens = routed_tokens(rows, ids, weights, feed);
  Result<float> out({rows.count, rows.width});
  {
    nb::gil_scoped_release release;
    moe_ffn(*shared_pool(), tokens, feed, out.data);
  }
  return out.array();
}

// The result, and what each expert's down was given.
nb::tuple moe_activations_op(const AnyArray& x, const AnyArray& ids, const AnyArray& weights,
                             RecordFeed& feed) {
  const Rows rows = rows_of(x, "moe_ffn", "x");
  RoutedTokens tokens = routed_tokens(rows, ids, weights, feed);
  Result<float> out({rows.count, rows.width});
  Result<float> activations({rows.count, tokens.num_chosen, feed.layout().down.cols});
  tokens.activations = activations.data;
  {
    nb::gil_scoped_release release;
    moe_ffn(*shared_pool(), tokens, feed, out.data);
  }
  return nb::make_tuple(out.array(), activations.array());
}

Router router_of(const Rows& rows, const PackedMatrix& weight, int64_t top_k, bool renormalize,
                 const char* op) {
  check_input(op, rows, weight.view);
  const Router router{weight.view, narrow(top_k, op, "top_k"), renormalize};
  check_router(router);
  return router;
}

nb::tuple router_op(const AnyArray& x, const PackedMatrix& weight, int64_t top_k,
                    bool renormalize) {
  const Rows rows = rows_of(x, "router_topk", "x");
  const Router router = router_of(rows, weight, top_k, renormalize, "router_topk");
  Result<int32_t> ids({rows.count, top_k});
  Result<float> weights({rows.count, top_k});
  {
    nb::gil_scoped_release release;
    route(*shared_pool(), rows.x, narrow(rows.count, "router_topk", "rows"), router, ids.data,
          weights.data);
  }
  return nb::make_tuple(ids.array(), weights.array());
}

// (hidden, norm, eps, router, layer) as NextRouter.
using NextTuple = std::tuple<AnyArray, AnyArray, float, const PackedMatrix*, int32_t>;

NextRouter next_router(const NextTuple& from, const Rows& rows, int64_t top_k, bool renormalize) {
  const auto& [hidden, norm, eps, weight, layer] = from;
  return {checked<float>(hidden, "routed_ffn", "hidden", {rows.count, rows.width}),
          checked<float>(norm, "routed_ffn", "norm", {rows.width}), eps,
          router_of(rows, *weight, top_k, renormalize, "routed_ffn"), layer};
}

NumpyArray<float> routed_op(const AnyArray& x, const PackedMatrix& weight, RecordSource& source,
                            int32_t layer, int64_t top_k, bool renormalize,
                            const std::optional<NextTuple>& following) {
  const Rows rows = rows_of(x, "routed_ffn", "x");
  const Router router = router_of(rows, weight, top_k, renormalize, "routed_ffn");
  check_experts("routed_ffn", rows, source.layout(layer));
  std::optional<NextRouter> next;
  if (following) next = next_router(*following, rows, top_k, renormalize);
  Result<float> out({rows.count, rows.width});
  {
    nb::gil_scoped_release release;
    routed_ffn(*shared_pool(), rows.x, narrow(rows.count, "routed_ffn", "rows"), router, source,
               layer, next ? &*next : nullptr, out.data);
  }
  return out.array();
}

// ---- sampling

int32_t sample_op(const AnyArray& logits, float temperature, int64_t top_k, float top_p,
                  float min_p, uint64_t seed, int64_t position) {
  const float* x = checked<float>(logits, "sample", "logits", {kAnySize});
  const int32_t vocab = narrow(static_cast<int64_t>(logits.shape(0)), "sample", "vocabulary");
  if (vocab < 1) throw_shape("sample: no logits");
  if (!(temperature >= 0.0f) || top_k < 0 || !(top_p > 0.0f && top_p <= 1.0f) ||
      !(min_p >= 0.0f && min_p <= 1.0f)) {
    throw_shape(
        "sample: parameter out of range\nexpected temperature >= 0, top_k >= 0, 0 < top_p <= 1 "
        "and 0 <= min_p <= 1");
  }
  const SampleParams params{temperature, static_cast<int32_t>(std::min<int64_t>(top_k, INT32_MAX)),
                            top_p,       min_p,
                            seed,        position};
  nb::gil_scoped_release release;
  return sample(x, vocab, params);
}

NumpyArray<float> log_softmax_op(const AnyArray& logits) {
  const Rows rows = rows_of(logits, "log_softmax", "logits");
  if (rows.width < 1) throw_shape("log_softmax: no logits");
  Result<float> out({rows.count, rows.width});
  {
    nb::gil_scoped_release release;
    log_softmax(*shared_pool(), rows.x, narrow(rows.count, "log_softmax", "rows"),
                narrow(rows.width, "log_softmax", "vocabulary"), out.data);
  }
  return out.array();
}

NumpyArray<float> penalties_op(const AnyArray& logits, const AnyArray& ids, const AnyArray& counts,
                               float repetition, float presence, float frequency) {
  const char* op = "apply_penalties";
  const float* x = checked<float>(logits, op, "logits", {kAnySize});
  const int32_t vocab = narrow(static_cast<int64_t>(logits.shape(0)), op, "vocabulary");
  Penalties penalties{};
  penalties.ids = checked<int32_t>(ids, op, "ids", {kAnySize});
  penalties.num_seen = narrow(static_cast<int64_t>(ids.shape(0)), op, "ids");
  penalties.counts = checked<int32_t>(counts, op, "counts", {penalties.num_seen});
  penalties.repetition = repetition;
  penalties.presence = presence;
  penalties.frequency = frequency;
  if (!(repetition > 0.0f)) throw_shape("apply_penalties: repetition must be above 0");
  for (int32_t i = 0; i < penalties.num_seen; ++i) {
    if (penalties.ids[i] < 0 || penalties.ids[i] >= vocab) {
      throw_shape("apply_penalties: id " + std::to_string(penalties.ids[i]) + " of " +
                  std::to_string(vocab));
    }
  }
  Result<float> out({vocab});
  apply_penalties(x, vocab, penalties, out.data);
  return out.array();
}

// ---- records in memory

// The feed with the Python arrays that its pointers look into.
class ResidentFeed final : public RecordFeed {
 public:
  ResidentFeed(MemoryFeed feed, std::vector<AnyArray> owners)
      : feed_(std::move(feed)), owners_(std::move(owners)) {}
  std::span<const int32_t> expert_ids() const override { return feed_.expert_ids(); }
  const ExpertLayout& layout() const override { return feed_.layout(); }
  int32_t next_ready(std::span<int32_t> out) override { return feed_.next_ready(out); }
  const std::byte* data(int32_t index) const override { return feed_.data(index); }
  void done(int32_t index) override { feed_.done(index); }
  bool rewind() { return feed_.rewind(); }

 private:
  MemoryFeed feed_;
  std::vector<AnyArray> owners_;
};

// Records by ascending id, and the arrays that hold them.
struct ResidentRecords {
  ExpertLayout layout;
  std::vector<int32_t> ids;
  std::vector<AnyArray> owners;
  std::vector<const std::byte*> data;
};

using RecordMap = std::map<int32_t, AnyArray>;

ResidentRecords resident_records(const MatrixTuple& gate, const MatrixTuple& up,
                                 const MatrixTuple& down, const RecordMap& records) {
  if (records.empty()) throw_shape("ResidentFeed: no records");
  ResidentRecords held;
  for (const auto& [id, record] : records) {
    const uint8_t* bytes = checked<uint8_t>(record, "ResidentFeed", "record", {kAnySize});
    if (reinterpret_cast<uintptr_t>(bytes) % 64 != 0) {
      throw_array("ResidentFeed", "record", "an address that is a multiple of 64", "another");
    }
    held.layout =
        expert_layout(gate, up, down, static_cast<int64_t>(record.shape(0)), "ResidentFeed");
    held.ids.push_back(id);
    held.owners.push_back(record);
    held.data.push_back(reinterpret_cast<const std::byte*>(bytes));
  }
  return held;
}

ResidentFeed make_resident_feed(const MatrixTuple& gate, const MatrixTuple& up,
                                const MatrixTuple& down, const RecordMap& records,
                                std::vector<int32_t> order, int32_t step) {
  ResidentRecords held = resident_records(gate, up, down, records);
  if (order.empty()) {
    order.resize(held.ids.size());
    std::iota(order.begin(), order.end(), 0);
  }
  std::vector<int32_t> sorted = order;
  std::sort(sorted.begin(), sorted.end());
  for (size_t i = 0; i < sorted.size() || i < held.ids.size(); ++i) {
    if (sorted.size() != held.ids.size() || sorted[i] != static_cast<int32_t>(i)) {
      throw_shape("ResidentFeed: order must hold every index once");
    }
  }
  return ResidentFeed(MemoryFeed(held.layout, held.ids, held.data, order, std::max(step, 1)),
                      std::move(held.owners));
}

// As ResidentFeed, for whoever routes: the experts of layer 0.
class ResidentSource final : public RecordSource {
 public:
  explicit ResidentSource(ResidentRecords held)
      : source_(held.layout, std::move(held.ids), std::move(held.data)),
        owners_(std::move(held.owners)) {}
  const ExpertLayout& layout(int32_t layer) const override { return source_.layout(layer); }
  std::unique_ptr<RecordFeed> feed(int32_t layer, std::span<const int32_t> ids,
                                   int32_t num_tokens) override {
    return source_.feed(layer, ids, num_tokens);
  }

 private:
  MemorySource source_;
  std::vector<AnyArray> owners_;
};

void bind_feeds(nb::module_& m) {
  nb::class_<RecordFeed>(m, "RecordFeed");
  nb::class_<ResidentFeed, RecordFeed>(m, "ResidentFeed")
      .def(
          "__init__",
          [](ResidentFeed* self, const MatrixTuple& gate, const MatrixTuple& up,
             const MatrixTuple& down, const RecordMap& records, std::vector<int32_t> order,
             int32_t step) {
            new (self) ResidentFeed(make_resident_feed(gate, up, down, records, order, step));
          },
          "gate"_a, "up"_a, "down"_a, "records"_a, "order"_a = std::vector<int32_t>{}, "step"_a = 1)
      .def("rewind", &ResidentFeed::rewind);
  nb::class_<RecordSource>(m, "RecordSource");
  nb::class_<ResidentSource, RecordSource>(m, "ResidentSource")
      .def(
          "__init__",
          [](ResidentSource* self, const MatrixTuple& gate, const MatrixTuple& up,
             const MatrixTuple& down, const RecordMap& records) {
            new (self) ResidentSource(resident_records(gate, up, down, records));
          },
          "gate"_a, "up"_a, "down"_a, "records"_a);
}

// ---- the machine

void bind_machine(nb::module_& m) {
  m.def("isa", [] { return isa_name(current_isa()); });
  m.def("set_isa", [](const std::string& name) { set_isa(parse_isa(name)); }, "name"_a);
  m.def("available_isas", [] {
    std::vector<std::string> names;
    for (Isa isa : available_isas()) names.emplace_back(isa_name(isa));
    return names;
  });
  m.def(
      "set_threads",
      [](int32_t n) {
        nb::gil_scoped_release release;
        set_num_threads(n);
      },
      "num_threads"_a);
  m.def("num_threads", [] { return shared_pool()->num_threads(); });
  m.def("pool_bytes", [] { return ArrayPool::shared().held_bytes(); });
  m.def("pool_trim", [] { ArrayPool::shared().trim(); });
}

}  // namespace

void bind_ops(nb::module_& m) {
  bind_machine(m);
  bind_matrices(m);
  bind_feeds(m);
  m.def("embedding_packed", embedding_packed, "ids"_a, "table"_a);
  m.def("embedding_rows", embedding_rows, "ids"_a, "table"_a);
  m.def("rms_norm", rms_norm, "x"_a, "weight"_a, "eps"_a);
  m.def("add", add_arrays, "x"_a, "y"_a);
  m.def("clamp", clamp_array, "x"_a, "limit"_a);
  m.def("linear", linear_op, "x"_a, "w"_a);
  m.def("linears", linears_op, "x"_a, "matrices"_a);
  m.def("norm_linears", norm_linears_op, "x"_a, "weight"_a, "eps"_a, "matrices"_a);
  m.def("linear_add", linear_add_op, "x"_a, "w"_a, "y"_a);
  m.def("swiglu_ffn", swiglu_op, "x"_a, "gate"_a, "up"_a, "down"_a);
  m.def("moe_ffn", moe_op, "x"_a, "ids"_a, "weights"_a, "lease"_a);
  m.def("moe_activations", moe_activations_op, "x"_a, "ids"_a, "weights"_a, "lease"_a);
  m.def("routed_ffn", routed_op, "x"_a, "router"_a, "source"_a, "layer"_a, nb::kw_only(), "top_k"_a,
        "renormalize"_a, "following"_a = nb::none());
  m.def("router_topk", router_op, "x"_a, "weight"_a, nb::kw_only(), "top_k"_a, "renormalize"_a);
  m.def("sample", sample_op, "logits"_a, nb::kw_only(), "temperature"_a, "top_k"_a, "top_p"_a,
        "min_p"_a, "seed"_a, "position"_a);
  m.def("log_softmax", log_softmax_op, "logits"_a);
  m.def("apply_penalties", penalties_op, "logits"_a, "ids"_a, "counts"_a, nb::kw_only(),
        "repetition"_a, "presence"_a, "frequency"_a);
}

}  // namespace headrace
