// What the machine itself can do, for benchmarks: reading memory, and arithmetic on registers.
#include <nanobind/stl/string.h>

#include <atomic>

#include "base/error.h"
#include "base/thread_pool.h"
#include "bind/arrays.h"
#include "bind/bind.h"
#include "kernels/kernel_table.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace headrace {
namespace {

uint32_t read_bytes(const AnyArray& data) {
  const uint8_t* bytes = checked<uint8_t>(data, "read_bytes", "data", {kAnySize});
  const auto size = static_cast<int64_t>(data.shape(0));
  nb::gil_scoped_release release;
  std::atomic<uint32_t> sum{0};
  const KernelTable& table = kernels();
  shared_pool()->run_ranges(size, 1 << 20, [&](int64_t begin, int64_t end) {
    sum += table.read_bytes(bytes + begin, end - begin);
  });
  return sum.load();
}

int64_t peak_operations(const std::string& unit, int64_t rounds) {
  if (unit != "float" && unit != "int8") {
    throw Error(ErrorKind::Config, "unit is float or int8, got " + unit);
  }
  const bool is_float = unit == "float";
  nb::gil_scoped_release release;
  std::atomic<int64_t> operations{0};
  const KernelTable& table = kernels();
  const std::shared_ptr<ThreadPool> pool = shared_pool();
  pool->run(pool->num_threads(), [&](int64_t) {
    float floats[16] = {0.5f};
    int32_t ints[16] = {1};
    operations += is_float ? table.peak_float(rounds, floats) : table.peak_int8(rounds, ints);
  });
  return operations.load();
}

}  // namespace

void bind_measure(nb::module_& m) {
  m.def("read_bytes", read_bytes, "data"_a);
  m.def("peak_operations", peak_operations, "unit"_a, "rounds"_a);
}

}  // namespace headrace
