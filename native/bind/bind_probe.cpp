// headrace._core: measuring a drive with the readers that the store uses.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/error.h"
#include "bind/arrays.h"
#include "bind/bind.h"
#include "io/probe.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace headrace {
namespace {

std::tuple<int64_t, int64_t, int64_t, int64_t, bool> probe(
    const std::vector<std::string>& paths, const std::vector<std::pair<int32_t, int64_t>>& places,
    int64_t record_bytes, int64_t block_bytes, int32_t readers, bool direct, bool with_checksum) {
  if (record_bytes <= 0 || record_bytes % io::kAlignment != 0 || block_bytes <= 0 ||
      block_bytes % io::kAlignment != 0 || readers < 1) {
    throw Error(ErrorKind::Config,
                "record_bytes and block_bytes must be multiples of 4096 above "
                "zero, readers 1 or more");
  }
  require_countable("probe_reads", {record_bytes, int64_t{readers} + 1});
  std::vector<io::ProbePlace> wanted;
  for (const auto& [file, offset] : places) {
    if (file < 0 || file >= static_cast<int32_t>(paths.size()) || offset < 0 ||
        offset % io::kAlignment != 0) {
      throw Error(ErrorKind::Config, "a place names no file, or an offset that is not aligned");
    }
    wanted.push_back({file, offset});
  }
  const nb::gil_scoped_release release;
  const io::ProbeResult result =
      io::probe_reads(paths, wanted, record_bytes, block_bytes, readers, direct, with_checksum);
  return {result.bytes, result.elapsed_ns, result.num_reads, result.read_ns, result.is_direct};
}

}  // namespace

void bind_probe(nb::module_& m) {
  m.def("probe_reads", &probe, "paths"_a, "places"_a, nb::kw_only(), "record_bytes"_a,
        "block_bytes"_a, "readers"_a, "direct"_a, "with_checksum"_a,
        "Read the record at each (file, offset) once as the store would; give bytes, elapsed ns, "
        "blocks, ns summed over reads, and whether every read was direct.");
}

}  // namespace headrace
