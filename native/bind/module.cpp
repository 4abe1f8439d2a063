// The Python module headrace._core: gathers the parts and translates native errors.
#include <nanobind/nanobind.h>

#include "base/error.h"
#include "bind/bind.h"

namespace nb = nanobind;

namespace {

const char* class_name(headrace::ErrorKind kind) {
  switch (kind) {
    case headrace::ErrorKind::Config:
      return "ConfigError";
    case headrace::ErrorKind::Checkpoint:
      return "CheckpointError";
    case headrace::ErrorKind::UnsupportedModel:
      return "UnsupportedModelError";
    case headrace::ErrorKind::MemoryBudget:
      return "MemoryBudgetError";
    case headrace::ErrorKind::ExpertRead:
      return "ExpertReadError";
    case headrace::ErrorKind::Request:
      return "RequestError";
    case headrace::ErrorKind::Numeric:
      return "NumericError";
    case headrace::ErrorKind::Shape:
      return "ShapeError";
  }
  return "EngineError";
}

void translate(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const headrace::Error& error) {
    nb::object type = nb::module_::import_("headrace.errors").attr(class_name(error.kind()));
    PyErr_SetString(type.ptr(), error.what());
  }
}

}  // namespace

NB_MODULE(_core, m) {
  m.doc() = "Kernels, readers and the expert store of headrace.";
  nb::register_exception_translator(translate);
  headrace::bind_ops(m);
  headrace::bind_attention(m);
  headrace::bind_measure(m);
  headrace::bind_store(m);
  headrace::bind_probe(m);
  headrace::bind_trace(m);
}
