// Rotary positions, the KV pool and attention as Python sees them. Checks arguments, drops the GIL,
// calls.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/thread_pool.h"
#include "bind/arrays.h"
#include "bind/bind.h"
#include "io/memory.h"
#include "kernels/attention.h"
#include "kernels/format.h"
#include "kernels/kernel_table.h"
#include "kernels/latent.h"
#include "kernels/rope.h"
#include "kernels/rotary_attention.h"

namespace headrace {
namespace {

using namespace nb::literals;

[[noreturn]] void throw_shape(const std::string& message) {
  throw Error(ErrorKind::Shape, message);
}

// ---- rope

nb::tuple rope_angles_op(const AnyArray& positions, const AnyArray& inv_freq, float factor) {
  const int32_t* p = checked<int32_t>(positions, "rope_angles", "positions", {kAnySize});
  const float* f = checked<float>(inv_freq, "rope_angles", "inv_freq", {kAnySize});
  const int64_t count = static_cast<int64_t>(positions.shape(0));
  const int64_t half = static_cast<int64_t>(inv_freq.shape(0));
  Result<float> cos({count, half});
  Result<float> sin({count, half});
  {
    nb::gil_scoped_release release;
    rope_angles(p, static_cast<int32_t>(count), f, static_cast<int32_t>(half), factor, cos.data,
                sin.data);
  }
  return nb::make_tuple(cos.array(), sin.array());
}

// cos [T, half]
int32_t rotated_pairs(const AnyArray& cos, int32_t head_dim, const char* op) {
  const int32_t half = narrow(static_cast<int64_t>(cos.shape(1)), op, "half");
  if (2 * int64_t{half} > head_dim) {
    throw_shape(std::string(op) + ": " + std::to_string(2 * int64_t{half}) +
                " rotary dims in heads of " + std::to_string(head_dim));
  }
  return half;
}

NumpyArray<float> rope_op(const AnyArray& x, const AnyArray& cos, const AnyArray& sin) {
  const float* data = checked<float>(x, "rope", "x", {kAnySize, kAnySize, kAnySize});
  const int64_t tokens = static_cast<int64_t>(x.shape(0));
  const int64_t heads = static_cast<int64_t>(x.shape(1));
  const int32_t head_dim = narrow(static_cast<int64_t>(x.shape(2)), "rope", "head_dim");
  const float* c = checked<float>(cos, "rope", "cos", {tokens, kAnySize});
  const int32_t half = rotated_pairs(cos, head_dim, "rope");
  const float* s = checked<float>(sin, "rope", "sin", {tokens, half});
  Result<float> out({tokens, heads, head_dim});
  {
    nb::gil_scoped_release release;
    const KernelTable& table = kernels();
    shared_pool()->run_ranges(tokens * heads, 256, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t t = i / heads;
        table.rope_head(data + i * head_dim, c + t * half, s + t * half, half, head_dim,
                        out.data + i * head_dim);
      }
    });
  }
  return out.array();
}

// ---- attention

KvPool make_kv_pool(int64_t num_layers, int64_t num_pages, int64_t num_kv_heads, int64_t head_dim,
                    int64_t page_tokens, const std::string& dtype) {
  const KvShape shape{
      narrow(num_layers, "KVPool", "num_layers"),     narrow(num_pages, "KVPool", "num_pages"),
      narrow(num_kv_heads, "KVPool", "num_kv_heads"), narrow(head_dim, "KVPool", "head_dim"),
      narrow(page_tokens, "KVPool", "page_tokens"),   parse_format(dtype)};
  check_kv_shape(shape);
  require_countable("KVPool", {num_layers, num_pages, num_kv_heads, head_dim, page_tokens});
  const auto memory = std::make_shared<io::PageBuffer>(shape.nbytes());
  return KvPool(shape, std::shared_ptr<std::byte>(memory, memory->data()));
}

// `rows` is any object with the three arrays of a step.
struct StepArrays {
  AnyArray positions, sequences, page_table;
  StepRows rows;
};

// `window` as in AttentionParams: pages before it need not exist.
StepArrays step_arrays(nb::handle object, int64_t num_rows, int32_t page_tokens, int32_t num_pages,
                       int32_t window, const char* op) {
  StepArrays step{nb::cast<AnyArray>(object.attr("positions")),
                  nb::cast<AnyArray>(object.attr("sequences")),
                  nb::cast<AnyArray>(object.attr("page_table")),
                  {}};
  StepRows& r = step.rows;
  r.positions = checked<int32_t>(step.positions, op, "positions", {num_rows});
  r.sequences = checked<int32_t>(step.sequences, op, "sequences", {num_rows});
  r.page_table = checked<int32_t>(step.page_table, op, "page_table", {kAnySize, kAnySize});
  r.num_rows = static_cast<int32_t>(num_rows);
  r.num_sequences = static_cast<int32_t>(step.page_table.shape(0));
  r.max_pages = static_cast<int32_t>(step.page_table.shape(1));
  check_step_rows(page_tokens, num_pages, window, r, op);
  return step;
}

void check_layer(int64_t layer, int32_t num_layers, const char* op) {
  if (layer >= 0 && layer < num_layers) return;
  throw_shape(std::string(op) + ": layer " + std::to_string(layer) + " of " +
              std::to_string(num_layers));
}

void kv_write_op(const KvPool& pool, int64_t layer, const AnyArray& k, const AnyArray& v,
                 nb::handle rows) {
  const KvShape& s = pool.shape();
  check_layer(layer, s.num_layers, "kv_write");
  const float* keys = checked<float>(k, "kv_write", "k", {kAnySize, s.num_kv_heads, s.head_dim});
  const int64_t count = static_cast<int64_t>(k.shape(0));
  const float* values = checked<float>(v, "kv_write", "v", {count, s.num_kv_heads, s.head_dim});
  const StepArrays step = step_arrays(rows, count, s.page_tokens, s.num_pages, 0, "kv_write");
  nb::gil_scoped_release release;
  kv_write(*shared_pool(), pool, static_cast<int32_t>(layer), keys, values, step.rows);
}

AttentionParams attention_params(float scale, std::optional<int64_t> window,
                                 const std::optional<AnyArray>& sinks, int32_t heads,
                                 const char* op) {
  if (window.has_value() && *window < 1) {
    throw_shape(std::string(op) + ": window must be at least 1, got " + std::to_string(*window));
  }
  return {scale, narrow(window.value_or(0), op, "window"),
          sinks.has_value() ? checked<float>(*sinks, op, "sinks", {heads}) : nullptr};
}

NumpyArray<float> attention_op(const AnyArray& q, const KvPool& pool, int64_t layer,
                               nb::handle rows, float scale, std::optional<int64_t> window,
                               const std::optional<AnyArray>& sinks) {
  const KvShape& s = pool.shape();
  check_layer(layer, s.num_layers, "paged_attention");
  const float* queries =
      checked<float>(q, "paged_attention", "q", {kAnySize, kAnySize, s.head_dim});
  const int64_t count = static_cast<int64_t>(q.shape(0));
  const int32_t heads = narrow(static_cast<int64_t>(q.shape(1)), "paged_attention", "heads");
  if (heads < 1 || heads % s.num_kv_heads != 0) {
    throw_shape("paged_attention: " + std::to_string(heads) + " query heads for " +
                std::to_string(s.num_kv_heads) + " kv heads");
  }
  const AttentionParams params = attention_params(scale, window, sinks, heads, "paged_attention");
  const StepArrays step =
      step_arrays(rows, count, s.page_tokens, s.num_pages, params.window, "paged_attention");
  Result<float> out({count, int64_t{heads} * s.head_dim});
  {
    nb::gil_scoped_release release;
    paged_attention(*shared_pool(), pool, static_cast<int32_t>(layer), queries, heads, params,
                    step.rows, out.data);
  }
  return out.array();
}

const float* head_norm(const std::optional<AnyArray>& weight, int32_t head_dim, const char* name) {
  if (!weight.has_value()) return nullptr;
  return checked<float>(*weight, "rotary_attention", name, {head_dim});
}

NumpyArray<float> rotary_op(const AnyArray& q, const AnyArray& k, const AnyArray& v,
                            const std::pair<AnyArray, AnyArray>& angles, const KvPool& pool,
                            int64_t layer, nb::handle rows, float scale,
                            const std::optional<AnyArray>& q_norm,
                            const std::optional<AnyArray>& k_norm, float eps,
                            std::optional<int64_t> window, const std::optional<AnyArray>& sinks) {
  constexpr const char* op = "rotary_attention";
  const KvShape& s = pool.shape();
  check_layer(layer, s.num_layers, op);
  Projections in{};
  in.q = checked<float>(q, op, "q", {kAnySize, kAnySize});
  const int64_t count = static_cast<int64_t>(q.shape(0));
  const int64_t width = static_cast<int64_t>(q.shape(1));
  const int64_t kv_width = int64_t{s.num_kv_heads} * s.head_dim;
  if (width < 1 || width % kv_width != 0) {
    throw_shape(std::string(op) + ": q of width " + std::to_string(width) + " for " +
                std::to_string(s.num_kv_heads) + " kv heads of " + std::to_string(s.head_dim));
  }
  in.num_heads = narrow(width / s.head_dim, op, "heads");
  in.k = checked<float>(k, op, "k", {count, kv_width});
  in.v = checked<float>(v, op, "v", {count, kv_width});
  in.q_norm = head_norm(q_norm, s.head_dim, "q_norm");
  in.k_norm = head_norm(k_norm, s.head_dim, "k_norm");
  in.eps = eps;
  const auto& [cos, sin] = angles;
  in.cos = checked<float>(cos, op, "cos", {count, kAnySize});
  in.half = rotated_pairs(cos, s.head_dim, op);
  in.sin = checked<float>(sin, op, "sin", {count, in.half});
  const AttentionParams params = attention_params(scale, window, sinks, in.num_heads, op);
  const StepArrays step = step_arrays(rows, count, s.page_tokens, s.num_pages, params.window, op);
  Result<float> out({count, width});
  {
    nb::gil_scoped_release release;
    rotary_attention(*shared_pool(), pool, static_cast<int32_t>(layer), in, params, step.rows,
                     out.data);
  }
  return out.array();
}

// ---- latents

LatentPool make_latent_pool(int64_t num_layers, int64_t num_pages, int64_t latent_dim,
                            int64_t rope_dim, int64_t page_tokens, const std::string& dtype) {
  const LatentShape shape{narrow(num_layers, "LatentPool", "num_layers"),
                          narrow(num_pages, "LatentPool", "num_pages"),
                          narrow(latent_dim, "LatentPool", "latent_dim"),
                          narrow(rope_dim, "LatentPool", "rope_dim"),
                          narrow(page_tokens, "LatentPool", "page_tokens"),
                          parse_format(dtype)};
  check_latent_shape(shape);
  require_countable("LatentPool", {num_layers, num_pages, shape.width(), page_tokens});
  const auto memory = std::make_shared<io::PageBuffer>(shape.nbytes());
  return LatentPool(shape, std::shared_ptr<std::byte>(memory, memory->data()));
}

void latent_write_op(const LatentPool& pool, int64_t layer, const AnyArray& latents,
                     nb::handle rows) {
  const LatentShape& s = pool.shape();
  check_layer(layer, s.num_layers, "latent_write");
  const float* data = checked<float>(latents, "latent_write", "latents", {kAnySize, s.width()});
  const StepArrays step = step_arrays(rows, static_cast<int64_t>(latents.shape(0)), s.page_tokens,
                                      s.num_pages, 0, "latent_write");
  nb::gil_scoped_release release;
  latent_write(*shared_pool(), pool, static_cast<int32_t>(layer), data, step.rows);
}

NumpyArray<float> latent_attention_op(const AnyArray& q, const LatentPool& pool, int64_t layer,
                                      nb::handle rows, float scale, std::optional<int64_t> window,
                                      const std::optional<AnyArray>& sinks) {
  constexpr const char* op = "latent_attention";
  const LatentShape& s = pool.shape();
  check_layer(layer, s.num_layers, op);
  const float* queries = checked<float>(q, op, "q", {kAnySize, kAnySize, s.width()});
  const int64_t count = static_cast<int64_t>(q.shape(0));
  const int32_t heads = narrow(static_cast<int64_t>(q.shape(1)), op, "heads");
  if (heads < 1) throw_shape("latent_attention: no query heads");
  const AttentionParams params = attention_params(scale, window, sinks, heads, op);
  const StepArrays step = step_arrays(rows, count, s.page_tokens, s.num_pages, params.window, op);
  Result<float> out({count, heads, s.latent_dim});
  {
    nb::gil_scoped_release release;
    latent_attention(*shared_pool(), pool, static_cast<int32_t>(layer), queries, heads, params,
                     step.rows, out.data);
  }
  return out.array();
}

void bind_latents(nb::module_& m) {
  nb::class_<LatentPool>(m, "LatentPool")
      .def(
          "__init__",
          [](LatentPool* self, int64_t num_layers, int64_t num_pages, int64_t latent_dim,
             int64_t rope_dim, int64_t page_tokens, const std::string& dtype) {
            new (self) LatentPool(
                make_latent_pool(num_layers, num_pages, latent_dim, rope_dim, page_tokens, dtype));
          },
          "num_layers"_a, "num_pages"_a, "latent_dim"_a, "rope_dim"_a, "page_tokens"_a = 64,
          "dtype"_a = "f16")
      .def_prop_ro("num_layers", [](const LatentPool& p) { return p.shape().num_layers; })
      .def_prop_ro("num_pages", [](const LatentPool& p) { return p.shape().num_pages; })
      .def_prop_ro("latent_dim", [](const LatentPool& p) { return p.shape().latent_dim; })
      .def_prop_ro("rope_dim", [](const LatentPool& p) { return p.shape().rope_dim; })
      .def_prop_ro("page_tokens", [](const LatentPool& p) { return p.shape().page_tokens; })
      .def_prop_ro("dtype", [](const LatentPool& p) { return format_name(p.shape().dtype); })
      .def_prop_ro("page_bytes", [](const LatentPool& p) { return p.shape().page_bytes(); })
      .def_prop_ro("nbytes", [](const LatentPool& p) { return p.shape().nbytes(); });
  m.def("latent_write", latent_write_op, "pool"_a, "layer"_a, "latents"_a, "rows"_a);
  m.def("latent_attention", latent_attention_op, "q"_a, "pool"_a, "layer"_a, "rows"_a, "scale"_a,
        nb::kw_only(), "window"_a = nb::none(), "sinks"_a = nb::none());
}

}  // namespace

void bind_attention(nb::module_& m) {
  bind_latents(m);
  nb::class_<KvPool>(m, "KVPool")
      .def(
          "__init__",
          [](KvPool* self, int64_t num_layers, int64_t num_pages, int64_t num_kv_heads,
             int64_t head_dim, int64_t page_tokens, const std::string& dtype) {
            new (self) KvPool(
                make_kv_pool(num_layers, num_pages, num_kv_heads, head_dim, page_tokens, dtype));
          },
          "num_layers"_a, "num_pages"_a, "num_kv_heads"_a, "head_dim"_a, "page_tokens"_a = 64,
          "dtype"_a = "f16")
      .def_prop_ro("num_layers", [](const KvPool& p) { return p.shape().num_layers; })
      .def_prop_ro("num_pages", [](const KvPool& p) { return p.shape().num_pages; })
      .def_prop_ro("num_kv_heads", [](const KvPool& p) { return p.shape().num_kv_heads; })
      .def_prop_ro("head_dim", [](const KvPool& p) { return p.shape().head_dim; })
      .def_prop_ro("page_tokens", [](const KvPool& p) { return p.shape().page_tokens; })
      .def_prop_ro("dtype", [](const KvPool& p) { return format_name(p.shape().dtype); })
      .def_prop_ro("page_bytes", [](const KvPool& p) { return p.shape().page_bytes(); })
      .def_prop_ro("nbytes", [](const KvPool& p) { return p.shape().nbytes(); });
  m.def("kv_write", kv_write_op, "pool"_a, "layer"_a, "k"_a, "v"_a, "rows"_a);
  m.def("paged_attention", attention_op, "q"_a, "pool"_a, "layer"_a, "rows"_a, "scale"_a,
        nb::kw_only(), "window"_a = nb::none(), "sinks"_a = nb::none());
  m.def("rotary_attention", rotary_op, "q"_a, "k"_a, "v"_a, "angles"_a, "pool"_a, "layer"_a,
        "rows"_a, "scale"_a, nb::kw_only(), "q_norm"_a = nb::none(), "k_norm"_a = nb::none(),
        "eps"_a = 0.0f, "window"_a = nb::none(), "sinks"_a = nb::none());
  m.def("rope_angles", rope_angles_op, "positions"_a, "inv_freq"_a, "factor"_a = 1.0f);
  m.def("rope", rope_op, "x"_a, "cos"_a, "sin"_a);
}

}  // namespace headrace
