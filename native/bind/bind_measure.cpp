// What the machine itself can do, for benchmarks: reading memory, and arithmetic on registers.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <vector>

#include "base/error.h"
#include "base/thread_pool.h"
#include "bind/arrays.h"
#include "bind/bind.h"
#include "kernels/kernel_table.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace headrace {
namespace {

// Large enough that starting a stream does not show, small enough to balance a few threads.
constexpr int64_t kReadBytes = 512 << 10;

uint32_t read_bytes(const std::vector<AnyArray>& arrays) {
  struct Piece {
    const uint8_t* data;
    int64_t num_bytes;
  };
  std::vector<Piece> pieces;
  for (const AnyArray& array : arrays) {
    const uint8_t* data = checked<uint8_t>(array, "read_bytes", "an array", {kAnySize});
    const auto size = static_cast<int64_t>(array.shape(0));
    for (int64_t from = 0; from < size; from += kReadBytes) {
      pieces.push_back({data + from, std::min(kReadBytes, size - from)});
    }
  }
  nb::gil_scoped_release release;
  std::atomic<uint32_t> sum{0};
  const KernelTable& table = kernels();
  shared_pool()->run(static_cast<int64_t>(pieces.size()), [&](int64_t i) {
    sum += table.read_bytes(pieces[i].data, pieces[i].num_bytes);
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
  m.def("read_bytes", read_bytes, "arrays"_a);
  m.def("peak_operations", peak_operations, "unit"_a, "rounds"_a);
}

}  // namespace headrace
