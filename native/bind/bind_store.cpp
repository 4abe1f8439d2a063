// headrace._core: reading files, the expert store and its leases, and the faults that tests inject.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/process.h"
#include "base/record_feed.h"
#include "bind/arrays.h"
#include "bind/bind.h"
#include "bind/expert_layout.h"
#include "io/checksum.h"
#include "io/fault.h"
#include "io/load.h"
#include "io/memory.h"
#include "io/throttle.h"
#include "kernels/coded.h"
#include "kernels/format.h"
#include "kernels/gguf_blocks.h"
#include "kernels/pack.h"
#include "store/expert_store.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace headrace {
namespace {

using store::ExpertStore;
using store::Lease;

using ByteArray = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstByteArray = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using IdArray = nb::ndarray<const int32_t, nb::c_contig, nb::device::cpu>;
template <typename T, int Dims>
using Table = nb::ndarray<const T, nb::ndim<Dims>, nb::c_contig, nb::device::cpu>;

std::span<const int32_t> id_span(const IdArray& ids) { return {ids.data(), ids.size()}; }

// A NumPy array that owns `values`.
template <typename T>
nb::ndarray<nb::numpy, T> to_numpy(std::vector<T> values, std::initializer_list<size_t> shape) {
  auto* kept = new std::vector<T>(std::move(values));
  nb::capsule owner(kept,
                    [](void* pointer) noexcept { delete static_cast<std::vector<T>*>(pointer); });
  return nb::ndarray<nb::numpy, T>(kept->data(), shape, owner);
}

using NamedRequest =
    std::tuple<std::string, std::string, int64_t, ByteArray, int64_t, std::optional<uint64_t>>;

// The files of a call, each opened once.
class OpenFiles {
 public:
  explicit OpenFiles(bool direct) : direct_(direct) {}

  io::Range range(const std::string& path, int64_t offset, const ByteArray& dest) {
    std::unique_ptr<io::File>& file = files_[path];
    if (!file) file = std::make_unique<io::File>(path, direct_, ErrorKind::Checkpoint);
    return {file.get(), offset, static_cast<int64_t>(dest.size()),
            reinterpret_cast<std::byte*>(dest.data())};
  }

 private:
  bool direct_;
  std::map<std::string, std::unique_ptr<io::File>> files_;
};

void read_into(const std::string& path, int64_t offset, const ByteArray& dest, int32_t readers,
               int64_t block_bytes, bool direct) {
  OpenFiles files(direct);
  const io::Range range = files.range(path, offset, dest);
  const nb::gil_scoped_release release;
  io::ReadPool pool(readers);
  io::read_ranges(pool, {&range, 1}, block_bytes, ErrorKind::Checkpoint);
}

void read_named(const std::vector<NamedRequest>& requests, int32_t readers, int64_t block_bytes,
                bool direct) {
  OpenFiles files(direct);
  std::vector<io::NamedRange> ranges;
  for (const auto& [name, path, offset, dest, checked_bytes, checksum] : requests) {
    if (checked_bytes < 0 || checked_bytes > static_cast<int64_t>(dest.size())) {
      throw Error(ErrorKind::Shape, "read_named: " + name + " has no " +
                                        std::to_string(checked_bytes) + " bytes to check");
    }
    ranges.push_back({name, files.range(path, offset, dest), checked_bytes, checksum});
  }
  const nb::gil_scoped_release release;
  io::read_named_ranges(ranges, readers, block_bytes);
}

// The repacking kernels are given to the store here, so that neither knows the other.
constexpr int32_t kPlainRows = -1;  // in place of a GGUF type: values of the matrix' own format

store::RowPacker::Complaint not_finite(
    const char* expected = "expected finite values only, got a NaN or infinity") {
  return {"expert weight is not finite", expected,
          "the checkpoint is damaged, or was saved from a run that diverged; run `headrace inspect "
          "--verify MODEL`"};
}

std::byte* block_of_row(const ExpertMatrix& matrix, int32_t row, std::byte* dest) {
  return dest + row / kBlockOutputs * block_bytes(matrix.format, matrix.cols, matrix.group);
}

class PlainRows final : public store::RowPacker {
 public:
  int64_t pack(const std::byte* source, float, const ExpertMatrix& matrix, int32_t first,
               int32_t count, std::byte* dest) const override {
    return interleave_rows(source, matrix.format, count, matrix.cols,
                           block_of_row(matrix, first, dest));
  }
  Complaint complaint() const override { return not_finite(); }
};

class GgufRows final : public store::RowPacker {
 public:
  explicit GgufRows(const GgufType& type) : type_(type) {}
  int64_t pack(const std::byte* source, float, const ExpertMatrix& matrix, int32_t first,
               int32_t count, std::byte* dest) const override {
    return repack_gguf(source, type_, count, matrix.cols, matrix.format, matrix.group,
                       block_of_row(matrix, first, dest));
  }
  Complaint complaint() const override { return not_finite(); }

 private:
  const GgufType& type_;
};

class CodedRowPacker final : public store::RowPacker {
 public:
  explicit CodedRowPacker(const CodedTensor& tensor) : tensor_(tensor) {}
  int64_t pack(const std::byte* source, float factor, const ExpertMatrix& matrix, int32_t first,
               int32_t count, std::byte* dest) const override {
    return place_coded(source, tensor_, factor, matrix, first, count, dest);
  }
  Complaint complaint() const override {
    if (tensor_.kind == CodedKind::GroupOfInput) {
      return {"inputs of an expert are not in the order of their groups (act-order)",
              "expected g_idx of input j to be j divided by the group, got another",
              "use a checkpoint that was quantised without desc_act"};
    }
    if (tensor_.kind == CodedKind::Bytes) {
      return not_finite("expected finite values only, got a code that is NaN");
    }
    if (tensor_.kind == CodedKind::ValuesByInput) return not_finite();
    return not_finite(tensor_.factor == ScaleFactor::None
                          ? "expected scales that are finite and fit, got another"
                          : "expected scales that are finite with the number they share "
                            "(weight_global_scale or weight_scale_2), got another");
  }

 private:
  CodedTensor tensor_;
};

// Rows of a tensor of gate and up; the gate's place is given, up's is told by the layout.
class GateUpRowPacker final : public store::RowPacker {
 public:
  GateUpRowPacker(const CodedTensor& tensor, GateUp split, int32_t row_values,
                  const ExpertLayout& layout)
      : tensor_(tensor),
        split_(split),
        row_values_(row_values),
        step_(layout.up.offset - layout.gate.offset) {}
  int64_t pack(const std::byte* source, float factor, const ExpertMatrix& matrix, int32_t first,
               int32_t count, std::byte* dest) const override {
    return place_gate_up(source, tensor_, split_, factor, matrix, first, count, dest, dest + step_);
  }
  Complaint complaint() const override { return CodedRowPacker(tensor_).complaint(); }
  int32_t matrix_at(int32_t gate, int64_t index) const override {
    return gate + gate_up_at(split_, row_values_, index);
  }

 private:
  CodedTensor tensor_;
  GateUp split_;
  int32_t row_values_;
  int64_t step_;
};

// In place of a matrix: a tensor of gate and up; added to the number of a GateUp.
constexpr int32_t kGateUp = 3;

// A coded tensor as Python names it: matrix, kind, type of scales, use of the factor, group and
// what is added to zeros.
using CodedTuple = std::tuple<int32_t, std::string, std::string, std::string, int32_t, int32_t>;

const ExpertMatrix& matrix_of(const ExpertLayout& layout, int32_t index) {
  if (index < 0 || index > 2) throw Error(ErrorKind::Shape, "an expert has three matrices");
  return layout.matrix(index);
}

// What `encoding` [layers, 3] says of the rows of each matrix.
std::vector<store::RowSource> row_sources(const Table<int32_t, 2>& encoding,
                                          const std::vector<ExpertLayout>& layouts) {
  if (encoding.shape(0) != layouts.size() || encoding.shape(1) != 3) {
    throw Error(ErrorKind::Shape, "encodings are not [layers, 3]");
  }
  std::vector<store::RowSource> sources;
  for (size_t i = 0; i < encoding.size(); ++i) {
    const auto index = static_cast<int32_t>(i % 3);
    const ExpertMatrix& matrix = layouts[i / 3].matrix(index);
    const int32_t id = encoding.data()[i];
    if (id == kPlainRows) {
      if (has_groups(matrix.format)) throw Error(ErrorKind::Shape, "plain rows hold no codes");
      const int32_t size = matrix.format == Format::F32 ? 4 : 2;
      sources.push_back({index, matrix.rows, int64_t{matrix.cols} * size, matrix.cols,
                         kBlockOutputs, size, std::make_shared<PlainRows>()});
      continue;
    }
    const GgufType& type = gguf_type(id);
    require_gguf(type, matrix.cols, matrix.format, matrix.group);
    sources.push_back({index, matrix.rows, int64_t{matrix.cols} / type.block * type.nbytes,
                       matrix.cols, kBlockOutputs, 1, std::make_shared<GgufRows>(type)});
  }
  return sources;
}

CodedTensor to_coded(const CodedTuple& from) {
  const auto& [index, kind, type, factor, group, zero_offset] = from;
  return {parse_coded_kind(kind), parse_scale_type(type), parse_scale_factor(factor), group,
          zero_offset};
}

std::byte* checked_dest(const ByteArray& packed, int64_t size, const char* op) {
  if (static_cast<int64_t>(packed.size()) != size) {
    throw Error(ErrorKind::Shape, std::string(op) + ": expected " + std::to_string(size) +
                                      " bytes to fill, got " + std::to_string(packed.size()));
  }
  return reinterpret_cast<std::byte*>(packed.data());
}

// A matrix packed on the calling thread from its tensors' bytes: what reader threads do.
void repack_coded(const std::vector<std::pair<CodedTuple, ConstByteArray>>& tensors,
                  const std::string& format, int32_t rows, int32_t cols, int32_t group,
                  const ByteArray& packed, float factor) {
  const ExpertMatrix matrix{parse_format(format), rows, cols, group, 0};
  require_countable("repack_coded", {rows, cols});
  const int64_t size = packed_bytes(matrix.format, rows, cols, checked_group(matrix.format, group));
  std::byte* const dest = checked_dest(packed, size, "repack_coded");
  for (const auto& [tuple, bytes] : tensors) {
    const CodedTensor tensor = to_coded(tuple);
    const CodedRows stored = coded_rows(tensor, matrix);
    if (static_cast<int64_t>(bytes.size()) != stored.rows * stored.row_bytes) {
      throw Error(ErrorKind::Shape, "repack_coded: expected " +
                                        std::to_string(stored.rows * stored.row_bytes) +
                                        " bytes, got " + std::to_string(bytes.size()));
    }
    const int64_t bad = place_coded(reinterpret_cast<const std::byte*>(bytes.data()), tensor,
                                    factor, matrix, 0, stored.rows, dest);
    if (bad >= 0) {
      throw Error(ErrorKind::Checkpoint, "weight is not finite: value " + std::to_string(bad) +
                                             " of a coded tensor cannot be taken");
    }
  }
  finish_coded(matrix, dest);
}

void repack_rows(const ConstByteArray& source, const std::string& format, int32_t rows,
                 int32_t cols, const ByteArray& packed) {
  const Format dtype = parse_format(format);
  const int64_t row_bytes = has_groups(dtype) || rows < 1 || cols < 1
                                ? -1
                                : packed_bytes(dtype, kBlockOutputs, cols, 1) / kBlockOutputs;
  require_countable("repack_rows", {rows, cols});
  if (row_bytes < 0 || static_cast<int64_t>(source.size()) != rows * row_bytes) {
    throw Error(ErrorKind::Shape, "repack_rows: expected rows of a floating format, got " +
                                      std::to_string(source.size()) + " bytes of " + format);
  }
  std::byte* const dest = checked_dest(packed, packed_bytes(dtype, rows, cols, 1), "repack_rows");
  const int64_t bad =
      interleave_rows(reinterpret_cast<const std::byte*>(source.data()), dtype, rows, cols, dest);
  if (bad >= 0) {
    throw Error(ErrorKind::Checkpoint, "weight is not finite: value " + std::to_string(bad));
  }
}

store::RowSource gate_up_source(const CodedTensor& tensor, int32_t number,
                                const ExpertLayout& layout) {
  const ExpertMatrix &gate = layout.gate, &up = layout.up;
  if (number > static_cast<int32_t>(GateUp::ColumnsAlternate) || gate.format != up.format ||
      gate.rows != up.rows || gate.cols != up.cols || gate.group != up.group) {
    throw Error(ErrorKind::Shape, "gate and up cannot stand in one tensor");
  }
  const auto split = static_cast<GateUp>(number);
  const CodedRows rows = gate_up_rows(tensor, split, gate);
  return {0,
          rows.rows,
          rows.row_bytes,
          rows.row_values,
          rows.granule,
          1,
          std::make_shared<GateUpRowPacker>(tensor, split, rows.row_values, layout)};
}

// Every layer's matrices consist of the same tensors.
void add_coded_sources(const std::vector<CodedTuple>& coded, const ExpertLayout& layout,
                       std::vector<store::RowSource>& sources) {
  for (const CodedTuple& one : coded) {
    const int32_t index = std::get<0>(one);
    const CodedTensor tensor = to_coded(one);
    if (index >= kGateUp) {
      sources.push_back(gate_up_source(tensor, index - kGateUp, layout));
      continue;
    }
    const CodedRows rows = coded_rows(tensor, matrix_of(layout, index));
    sources.push_back({index, rows.rows, rows.row_bytes, rows.row_values, rows.granule, 1,
                       std::make_shared<CodedRowPacker>(tensor)});
  }
}

// Gate, up, down and the size of a record.
using LayoutTuple = std::tuple<MatrixTuple, MatrixTuple, MatrixTuple, int64_t>;

std::shared_ptr<ExpertStore> open_store(
    std::vector<std::string> files, std::vector<int32_t> layers, int32_t num_experts,
    const std::vector<LayoutTuple>& layouts, const Table<int32_t, 3>& file,
    const Table<int64_t, 3>& offset, const Table<int64_t, 3>& length,
    const std::optional<Table<uint64_t, 2>>& checksum,
    const std::optional<Table<int32_t, 2>>& encoding, const std::vector<CodedTuple>& coded,
    const std::optional<Table<float, 3>>& factors, std::vector<int32_t> drive_of_file,
    const Table<int64_t, 2>& copies, const store::Options& options) {
  store::RecordTable table;
  table.files = std::move(files);
  table.layers = std::move(layers);
  table.num_experts = num_experts;
  for (const auto& [gate, up, down, record_bytes] : layouts) {
    require_countable("ExpertStore", {record_bytes, options.num_slots});
    table.layouts.push_back(expert_layout(gate, up, down, record_bytes, "ExpertStore"));
  }
  table.parts_per_record = static_cast<int32_t>(file.shape(2));
  if (offset.size() != file.size() || length.size() != file.size()) {
    throw Error(ErrorKind::Shape, "file, offset and length of the record table differ in shape");
  }
  table.parts.reserve(file.size());
  for (size_t i = 0; i < file.size(); ++i) {
    table.parts.push_back({file.data()[i], offset.data()[i], length.data()[i]});
  }
  if (checksum) table.checksums.assign(checksum->data(), checksum->data() + checksum->size());
  if (encoding) table.sources = row_sources(*encoding, table.layouts);
  if (!coded.empty()) {
    for (const ExpertLayout& layout : table.layouts)
      add_coded_sources(coded, layout, table.sources);
    table.finish = &finish_coded;
  }
  if (factors) table.factors.assign(factors->data(), factors->data() + factors->size());
  table.drive_of_file = std::move(drive_of_file);
  if (copies.shape(1) != 3) {
    throw Error(ErrorKind::Shape, "copies of records are not rows of record, file and offset");
  }
  for (size_t i = 0; i < copies.shape(0); ++i) {
    const int64_t* row = copies.data() + 3 * i;
    table.copies.push_back({narrow(row[0], "ExpertStore", "copied record"),
                            narrow(row[1], "ExpertStore", "file"), row[2]});
  }
  return ExpertStore::open(std::move(table), options);
}

std::map<std::string, int64_t> stats_map(const ExpertStore& store) {
  const store::Stats stats = store.stats();
  return {{"requests", stats.requests},
          {"hits", stats.hits},
          {"misses", stats.misses},
          {"joined", stats.joined},
          {"prefetch_hits", stats.prefetch_hits},
          {"evictions", stats.evictions},
          {"bytes_read", stats.bytes_read},
          {"prefetch_bytes", stats.prefetch_bytes},
          {"reread_bytes", stats.reread_bytes},
          {"failed_reads", stats.failed_reads},
          {"failed_copies", stats.failed_copies},
          {"cancelled", stats.cancelled},
          {"stolen", stats.stolen},
          {"stall_ns", stats.stall_ns},
          {"read_ns", stats.read_ns},
          {"drive_busy_ns", stats.drive_busy_ns},
          {"reads_in_flight_max", stats.reads_in_flight_max},
          {"lookahead_named", stats.lookahead.named},
          {"lookahead_wanted", stats.lookahead.wanted},
          {"lookahead_right", stats.lookahead.right},
          {"lookahead_used", stats.lookahead.used},
          {"lookahead_unused", stats.lookahead.unused},
          {"lookahead_saved_ns", stats.lookahead.saved_ns},
          {"is_direct", stats.is_direct ? 1 : 0}};
}

void bind_memory(nb::module_& m) {
  m.def(
      "lock_memory",
      [](const ConstByteArray& bytes) {
        io::lock_pages(reinterpret_cast<const std::byte*>(bytes.data()),
                       static_cast<int64_t>(bytes.size()));
      },
      "bytes"_a.noconvert(), "Keep the pages of a byte array from being swapped out.");
  m.def("memory_nodes", &io::memory_nodes, "sysfs"_a, "Numbers of the NUMA nodes with memory.");
  m.def(
      "can_interleave",
      [](const std::vector<int>& nodes) {
        const io::PageBuffer page(io::kAlignment);
        return io::interleave(page.data(), page.size_bytes(), nodes);
      },
      "nodes"_a, "Whether the system spreads pages of this process over these nodes.");
  m.def("trim_heap", &io::trim_heap, nb::call_guard<nb::gil_scoped_release>(),
        "Give the system the pages that the C library keeps of what was freed.");
}

void bind_reading(nb::module_& m) {
  m.def(
      "checksum",
      [](const ConstByteArray& bytes) {
        const nb::gil_scoped_release release;
        return io::checksum({reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()});
      },
      "bytes"_a.noconvert(), "hr64 of a byte array.");

  m.def("read_into", &read_into, "path"_a, "offset"_a, "dest"_a.noconvert(), nb::kw_only(),
        "readers"_a = 4, "block_bytes"_a = io::kDefaultBlockBytes, "direct"_a = true,
        "Fill dest with the file's bytes from offset on, by parallel direct reads.");

  m.def(
      "read_named", &read_named, "requests"_a, nb::kw_only(), "readers"_a = 4,
      "block_bytes"_a = io::kDefaultBlockBytes, "direct"_a = true,
      "read_into for many (name, path, offset, dest, checked_bytes, checksum): the reading threads "
      "verify the checksum of each dest's first checked_bytes, if one is given.");

  nb::class_<io::RowReader>(m, "RowReader", "Rows of a row-major table that stays on the drive.")
      .def(nb::new_([](std::string path, int64_t offset, int64_t row_bytes, int64_t num_rows,
                       bool direct) {
             return owned_by_this_process(
                 new io::RowReader(std::move(path), offset, row_bytes, num_rows, direct));
           }),
           "path"_a, "offset"_a, "row_bytes"_a, "num_rows"_a = -1, "direct"_a = true)
      .def_prop_ro("num_rows", &io::RowReader::num_rows)
      .def_prop_ro("row_bytes", &io::RowReader::row_bytes)
      .def(
          "read",
          [](io::RowReader& reader, const Table<int32_t, 1>& ids) {
            const size_t row_bytes = static_cast<size_t>(reader.row_bytes());
            std::vector<uint8_t> rows(ids.size() * row_bytes);
            {
              const nb::gil_scoped_release release;
              reader.read({ids.data(), ids.size()}, reinterpret_cast<std::byte*>(rows.data()));
            }
            return to_numpy(std::move(rows), {ids.size(), row_bytes});
          },
          "ids"_a.noconvert(), "The rows of ids [T] int32 as [T, row_bytes] uint8.");
}

void bind_faults(nb::module_& m) {
  m.def(
      "inject_fault",
      [](const std::string& kind, int64_t after, int64_t count, std::string path_contains,
         int64_t offset) {
        fault::inject({fault::parse_kind(kind), after, count, std::move(path_contains), offset});
      },
      "kind"_a, "after"_a = 0, "count"_a = 1, "path_contains"_a = "", "offset"_a = -1,
      "For tests: let reads fail. kind: eio, short, end, delay, flip, einval, stale_slot. `after` "
      "matching reads pass first, then `count` fail (negative: all); only files whose path "
      "contains "
      "the text, only reads that cover byte `offset` of the file if it is not negative.");
  m.def("clear_faults", &fault::clear, "Disarm every injected fault.");
  m.def("num_faults_fired", &fault::num_fired, "Faults that struck since the last clear_faults.");
  m.def(
      "slow_drive",
      [](std::string path_prefix, double bytes_per_s, double latency_s) {
        throttle::set({std::move(path_prefix), bytes_per_s, latency_s});
      },
      "path_prefix"_a, nb::kw_only(), "bytes_per_s"_a, "latency_s"_a = 0.0,
      "For tests and benches: let reads of files whose path begins so take as long as on a drive "
      "of "
      "this bandwidth and latency.");
  m.def("clear_slow_drives", &throttle::clear, "Let every drive be as fast as it is.");
}

// A lease whose memory Python gives back: it calls the destructor and frees, where a lease returns
// to the pool it came from.
class HeldLease final : public RecordFeed {
 public:
  explicit HeldLease(std::unique_ptr<Lease> lease) : lease_(std::move(lease)) {}
  std::span<const int32_t> expert_ids() const override { return lease_->expert_ids(); }
  std::span<const int32_t> num_tokens() const { return lease_->num_tokens(); }
  const ExpertLayout& layout() const override { return lease_->layout(); }
  int32_t next_ready(std::span<int32_t> out) override { return lease_->next_ready(out); }
  const std::byte* data(int32_t index) const override { return lease_->data(index); }
  void done(int32_t index) override { lease_->done(index); }
  void release() { lease_->release(); }

 private:
  std::unique_ptr<Lease> lease_;
};

void bind_lease(nb::module_& m) {
  nb::class_<HeldLease, RecordFeed>(m, "Lease", "A claim on the records of one layer for one step.")
      .def_prop_ro(
          "expert_ids",
          [](const HeldLease& lease) {
            const auto ids = lease.expert_ids();
            return to_numpy(std::vector<int32_t>(ids.begin(), ids.end()), {ids.size()});
          },
          nb::rv_policy::automatic,  // the array has its own owner
          "Distinct expert ids, ascending; an index below is a position here.")
      .def_prop_ro(
          "num_tokens",
          [](const HeldLease& lease) {
            const auto counts = lease.num_tokens();
            return to_numpy(std::vector<int32_t>(counts.begin(), counts.end()), {counts.size()});
          },
          nb::rv_policy::automatic, "Tokens routed to each expert.")
      .def(
          "next_ready",
          [](HeldLease& lease) {
            std::vector<int32_t> ready(lease.expert_ids().size());
            {
              const nb::gil_scoped_release release;
              ready.resize(static_cast<size_t>(lease.next_ready(ready)));
            }
            return ready;
          },
          "Wait for records; the indices that became ready, empty once all were handed out.")
      .def(
          "data",
          [](nb::handle_t<HeldLease> self, int32_t index) {
            const HeldLease& lease = nb::cast<const HeldLease&>(self);
            const auto* bytes = reinterpret_cast<const uint8_t*>(lease.data(index));
            return nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>>(
                bytes, {static_cast<size_t>(lease.layout().record_bytes)}, self);
          },
          "index"_a, "The record's bytes, without a copy: they change after done or release.")
      .def("done", &HeldLease::done, "index"_a, nb::call_guard<nb::gil_scoped_release>(),
           "The record's bytes are no longer needed.")
      .def("release", &HeldLease::release, nb::call_guard<nb::gil_scoped_release>(),
           "Give every slot back; may be called again.")
      .def("__enter__", [](nb::handle_t<HeldLease> self) { return nb::borrow(self); })
      .def(
          "__exit__",
          [](HeldLease& lease, const nb::args&) {
            const nb::gil_scoped_release release;
            lease.release();
          },
          nb::sig("def __exit__(self, *args: object) -> None"));
}

void bind_expert_store(nb::module_& m) {
  m.def("repack_rows", &repack_rows, "source"_a, "format"_a, "rows"_a, "cols"_a,
        "packed"_a.noconvert(),
        "Rows of floating values, packed as a reader of records in place does.");
  m.def("repack_coded", &repack_coded, "tensors"_a, "format"_a, "rows"_a, "cols"_a, "group"_a,
        "packed"_a.noconvert(), "factor"_a = 1.0f,
        "Fill a packed matrix from (description, bytes) of the tensors that it is stored as.");
  nb::class_<ExpertStore, RecordSource>(m, "ExpertStore", "The owner of every expert byte.")
      .def(
          nb::new_([](std::vector<std::string> files, std::vector<int32_t> layers,
                      int32_t num_experts, const std::vector<LayoutTuple>& layouts,
                      const Table<int32_t, 3>& file,
                      const Table<int64_t, 3>& offset, const Table<int64_t, 3>& length,
                      const std::optional<Table<uint64_t, 2>>& checksum,
                      const std::optional<Table<int32_t, 2>>& encoding,
                      const std::vector<CodedTuple>& coded,
                      const std::optional<Table<float, 3>>& factors, int32_t num_slots,
                      int32_t num_readers, int64_t block_bytes, int32_t read_ahead, bool direct,
                      double half_life_tokens, bool lock, const std::string& policy, bool lookahead,
                      std::vector<int32_t> drive_of_file, const Table<int64_t, 2>& copies,
                      const std::vector<std::pair<int32_t, double>>& drives) {
            store::Options options{.num_slots = num_slots,
                                   .num_readers = num_readers,
                                   .block_bytes = block_bytes,
                                   .read_ahead = read_ahead,
                                   .direct = direct,
                                   .half_life_tokens = half_life_tokens,
                                   .lock = lock,
                                   .policy = store::parse_policy(policy),
                                   .drives = {},
                                   .lookahead = lookahead};
            for (const auto& [readers, rate] : drives) options.drives.push_back({readers, rate});
            return open_store(std::move(files), std::move(layers), num_experts, layouts,
                              file, offset, length, checksum, encoding, coded,
                              factors, std::move(drive_of_file), copies, options);
          }),
          nb::kw_only(), "files"_a, "layers"_a, "num_experts"_a, "layouts"_a, "file"_a, "offset"_a, "length"_a, "checksum"_a.none(),
          "encoding"_a.none(), "coded"_a, "factors"_a.none(), "num_slots"_a, "num_readers"_a,
          "block_bytes"_a, "read_ahead"_a, "direct"_a, "half_life_tokens"_a, "lock"_a, "policy"_a,
          "lookahead"_a, "drive_of_file"_a, "copies"_a, "drives"_a)
      .def(
          "acquire",
          [](ExpertStore& store, int32_t layer, const Table<int32_t, 2>& ids) {
            const nb::gil_scoped_release release;
            return std::make_unique<HeldLease>(
                store.acquire(layer, {ids.data(), ids.size()}, static_cast<int32_t>(ids.shape(0))));
          },
          "layer"_a, "ids"_a.noconvert())
      .def(
          "prefetch",
          [](ExpertStore& store, int32_t layer, const IdArray& ids) {
            const nb::gil_scoped_release release;
            store.prefetch(layer, id_span(ids));
          },
          "layer"_a, "ids"_a.noconvert())
      .def_prop_ro("wants_advice", &ExpertStore::wants_advice)
      .def(
          "look_ahead",
          [](ExpertStore& store, int32_t layer, const Table<int32_t, 2>& ids) {
            const nb::gil_scoped_release release;
            store.look_ahead(layer, {ids.data(), ids.size()}, static_cast<int32_t>(ids.shape(0)));
          },
          "layer"_a, "ids"_a.noconvert())
      .def(
          "warm",
          [](ExpertStore& store, const std::vector<std::pair<int32_t, int32_t>>& records) {
            const nb::gil_scoped_release release;
            store.warm(records);
          },
          "records"_a)
      .def(
          "held",
          [](const ExpertStore& store, int32_t layer) {
            std::vector<uint8_t> held = store.held(layer);
            const size_t num_experts = held.size();
            return to_numpy(std::move(held), {num_experts});
          },
          "layer"_a)
      .def("frequencies",
           [](const ExpertStore& store) {
             return to_numpy(store.frequencies(), {store.table().layers.size(),
                                                   static_cast<size_t>(store.table().num_experts)});
           })
      .def(
          "set_frequencies",
          [](ExpertStore& store, const Table<double, 2>& frequencies) {
            store.set_frequencies({frequencies.data(), frequencies.size()});
          },
          "frequencies"_a.noconvert())
      .def("routed_counts",
           [](const ExpertStore& store) {
             return to_numpy(
                 store.routed_counts(),
                 {store.table().layers.size(), static_cast<size_t>(store.table().num_experts)});
           })
      .def("start_trace", &ExpertStore::start_trace,
           "Collect every routed id from now on; take_trace empties what was collected.")
      .def(
          "trace_step",
          [](ExpertStore& store, const std::vector<std::tuple<uint64_t, int32_t, bool>>& parts) {
            std::vector<store::TracePart> rows;
            for (const auto& [sequence, num_tokens, is_prefill] : parts) {
              rows.push_back({sequence, num_tokens, is_prefill});
            }
            store.trace_step(rows);
          },
          "parts"_a, "Announce a step: (sequence, tokens, is prefill) in the order of its rows.")
      .def("take_trace",
           [](ExpertStore& store) {
             const std::vector<std::byte> bytes = store.take_trace();
             return nb::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
           })
      .def_prop_ro("num_routed_tokens", &ExpertStore::num_routed_tokens)
      .def("resize", &ExpertStore::resize, "num_slots"_a, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("num_slots", &ExpertStore::num_slots)
      .def_prop_ro("num_untouched_slots", &ExpertStore::num_untouched_slots)
      .def("stats", &stats_map)
      .def(
          "drive_stats",
          [](const ExpertStore& store) {
            std::vector<std::tuple<int64_t, int64_t, double, int64_t, bool>> rows;
            for (const store::DriveStats& one : store.drive_stats()) {
              rows.emplace_back(one.bytes_read, one.busy_ns, one.bytes_per_s, one.num_failed,
                                one.is_given_up);
            }
            return rows;
          },
          "(bytes read, busy ns, bytes per second expected, failed copies, given up) of each "
          "drive.")
      .def("copy_error", &ExpertStore::copy_error)
      .def("close", &ExpertStore::close, nb::call_guard<nb::gil_scoped_release>())
      .def("debug_check", &ExpertStore::debug_check);
}

}  // namespace

void bind_store(nb::module_& m) {
  bind_memory(m);
  bind_reading(m);
  bind_faults(m);
  bind_lease(m);
  bind_expert_store(m);
}

}  // namespace headrace
