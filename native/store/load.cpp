#include "store/load.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "io/checksum.h"

namespace headrace::store {
namespace {

constexpr int32_t kBlockOutputs = 16;  // outputs are interleaved by 16: see kernels/format.h
constexpr std::array<const char*, 3> kPartNames{"gate", "up", "down"};

size_t at(int64_t value) { return static_cast<size_t>(value); }

const ExpertMatrix& matrix(const ExpertLayout& layout, int32_t part) {
  return part == 0 ? layout.gate : part == 1 ? layout.up : layout.down;
}

int64_t element_bytes(Format format) { return format == Format::F32 ? 4 : 2; }

int64_t num_values(const ExpertMatrix& matrix) { return int64_t{matrix.rows} * matrix.cols; }

// How a part of a record in place stands in its file.
const RowSource& row_source(const RecordTable& table, int32_t record, int32_t part) {
  return table.sources[at(record / table.num_experts * 3 + part)];
}

// Rows of one block of a record in place: whole groups of 16, about block_bytes.
int32_t rows_per_block(const RowSource& source, int64_t block_bytes) {
  const int64_t groups = block_bytes / (source.row_bytes * kBlockOutputs);
  return static_cast<int32_t>(std::clamp<int64_t>(groups, 1, 1 << 20)) * kBlockOutputs;
}

int32_t blocks_of(const ExpertMatrix& matrix, const RowSource& source, int64_t block_bytes) {
  const int32_t step = rows_per_block(source, block_bytes);
  return (matrix.rows + step - 1) / step;
}

// Length of each block but the last of a packed record: equal shares, so that no reader is left
// with a short end while another still reads a full block.
int64_t packed_block_bytes(int64_t length, int64_t block_bytes) {
  const int64_t count = (length + block_bytes - 1) / block_bytes;
  return io::align_up((length + count - 1) / count);
}

[[noreturn]] void fail(const std::string& message) {
  throw Error(ErrorKind::Checkpoint, "expert table is inconsistent: " + message);
}

// Whether the rows that every layer reads for a part fit the record.
void check_sources(const RecordTable& table) {
  if (table.sources.size() != table.layers.size() * 3) fail("encodings are missing");
  for (size_t i = 0; i < table.sources.size(); ++i) {
    const RowSource& source = table.sources[i];
    const ExpertMatrix& one = matrix(table.layout, static_cast<int32_t>(i % 3));
    const int64_t blocks = (int64_t{one.rows} + kBlockOutputs - 1) / kBlockOutputs;
    const bool is_plain = source.encoding == kPlainRows;
    if (source.row_bytes <= 0 || source.packed_bytes <= 0 ||
        (is_plain && source.row_bytes != one.cols * element_bytes(one.format)) ||
        source.packed_bytes > table.layout.record_bytes ||
        one.offset + blocks * source.packed_bytes > table.layout.record_bytes) {
      fail(std::string("matrix ") + kPartNames[i % 3] + " cannot be read in place");
    }
  }
}

}  // namespace

void check_table(const RecordTable& table) {
  const bool is_in_place = table.repack != nullptr;
  const size_t num_records = table.layers.size() * at(std::max(table.num_experts, 0));
  const int64_t record_bytes = table.layout.record_bytes;
  if (num_records == 0) fail("it holds no record");
  if (table.parts_per_record != (is_in_place ? 3 : 1)) {
    fail("expected " + std::to_string(is_in_place ? 3 : 1) + " ranges per record, got " +
         std::to_string(table.parts_per_record));
  }
  if (table.parts.size() != num_records * at(table.parts_per_record)) fail("ranges are missing");
  if (!table.checksums.empty() && table.checksums.size() != num_records)
    fail("checksums are missing");
  if (record_bytes <= 0 || record_bytes % io::kAlignment != 0) {
    fail("record size " + std::to_string(record_bytes) + " is not a multiple of 4096");
  }
  for (int32_t part = 0; part < 3; ++part) {
    const ExpertMatrix& one = matrix(table.layout, part);
    if (one.rows <= 0 || one.cols <= 0 || one.offset < 0 || one.offset % 64 != 0 ||
        one.offset >= record_bytes) {
      fail(std::string("matrix ") + kPartNames[at(part)] + " does not fit the record");
    }
  }
  if (is_in_place) check_sources(table);
  for (size_t i = 0; i < table.parts.size(); ++i) {
    const RecordPart& part = table.parts[i];
    const int32_t role = static_cast<int32_t>(i % 3);
    const int64_t expected =
        is_in_place ? matrix(table.layout, role).rows *
                          row_source(table, static_cast<int32_t>(i / 3), role).row_bytes
                    : record_bytes;
    if (part.file < 0 || at(part.file) >= table.files.size() || part.offset < 0 ||
        part.length != expected) {
      fail("range " + std::to_string(i) + " has " + std::to_string(part.length) +
           " bytes at offset " + std::to_string(part.offset) + " of file " +
           std::to_string(part.file) + ", expected " + std::to_string(expected) + " bytes");
    }
    if (!is_in_place && part.offset % io::kAlignment != 0) {
      fail("record " + std::to_string(i) + " starts at offset " + std::to_string(part.offset) +
           ", not a multiple of 4096");
    }
  }
}

ExpertStore::Load::Load(ExpertStore& store, int32_t record, int32_t slot, io::Priority priority,
                        int32_t place, Drives::Places tried)
    : store_(store),
      record_(record),
      slot_(slot),
      priority_(priority),
      place_(place),
      tried_(tried | Drives::Places{1} << place) {
  const ExpertLayout& layout = store.table_.layout;
  const int64_t block_bytes = store.options_.block_bytes;
  if (store.table_.repack == nullptr) {
    const int64_t step = packed_block_bytes(layout.record_bytes, block_bytes);
    num_blocks_ = static_cast<int32_t>((layout.record_bytes + step - 1) / step);
  } else {
    for (int32_t part = 0; part < 3; ++part)
      num_blocks_ += blocks_of(matrix(layout, part), source(part), block_bytes);
  }
}

const RowSource& ExpertStore::Load::source(int32_t part) const {
  return row_source(store_.table_, record_, part);
}

ExpertStore::Load::Rows ExpertStore::Load::rows(int32_t index) const {
  const int64_t block_bytes = store_.options_.block_bytes;
  for (int32_t part = 0;; ++part) {
    const ExpertMatrix& one = matrix(store_.table_.layout, part);
    const int32_t count = blocks_of(one, source(part), block_bytes);
    if (index >= count) {
      index -= count;
      continue;
    }
    const int32_t step = rows_per_block(source(part), block_bytes);
    return {part, index * step, std::min(step, one.rows - index * step)};
  }
}

RecordPart ExpertStore::Load::part(int32_t index) const {
  if (place_ == 0) return store_.parts(record_)[at(index)];
  const RecordCopy& copy = store_.readers_->copy(record_, place_);
  return {copy.file, copy.offset, store_.table_.layout.record_bytes};
}

io::ReadBlock ExpertStore::Load::block(int32_t index) const {
  if (store_.table_.repack == nullptr) {
    const RecordPart whole = part(0);
    const int64_t step = packed_block_bytes(whole.length, store_.options_.block_bytes);
    const int64_t start = index * step;
    return {store_.files_[at(whole.file)].get(), whole.offset + start,
            std::min(step, whole.length - start), store_.slot_data(slot_) + start};
  }
  const Rows run = rows(index);
  const int64_t bytes = source(run.part).row_bytes;
  const RecordPart matrix_part = part(run.part);
  return {store_.files_[at(matrix_part.file)].get(), matrix_part.offset + run.first * bytes,
          run.count * bytes, nullptr};
}

void ExpertStore::Load::consume(int32_t index, std::byte* bytes) {
  const Rows run = rows(index);
  const ExpertMatrix& one = matrix(store_.table_.layout, run.part);
  const RowSource& from = source(run.part);
  // A file may place a tensor of plain values at an odd offset; the bytes before it are not needed.
  const size_t size = from.encoding == kPlainRows ? at(element_bytes(one.format)) : 1;
  const int64_t misfit = static_cast<int64_t>(reinterpret_cast<uintptr_t>(bytes) % size);
  if (misfit != 0) {
    std::memmove(bytes - misfit, bytes, at(run.count * from.row_bytes));
    bytes -= misfit;
  }
  std::byte* dest =
      store_.slot_data(slot_) + one.offset + run.first / kBlockOutputs * from.packed_bytes;
  const int64_t bad = store_.table_.repack(bytes, from.encoding, one, run.count, dest);
  if (bad >= 0) note_bad_weight(run.part, int64_t{run.first} * one.cols + bad);
}

void ExpertStore::Load::note_bad_weight(int32_t part, int64_t index) {
  for (int32_t before = 0; before < part; ++before)
    index += num_values(matrix(store_.table_.layout, before));
  int64_t seen = first_bad_.load();
  while (index < seen && !first_bad_.compare_exchange_weak(seen, index)) {
  }
}

void ExpertStore::Load::finished(const std::optional<io::ReadFailure>& failure,
                                 int64_t bytes_read) {
  std::string error = failure ? read_error(*failure) : weight_error();
  if (error.empty()) error = checksum_error();
  is_damaged_ = !failure && !error.empty();
  store_.loaded(*this, std::move(error), bytes_read);
}

std::string ExpertStore::Load::name() const {
  const int32_t row = record_ / store_.table_.num_experts;
  return "layer " + std::to_string(store_.table_.layers[at(row)]) + ", expert " +
         std::to_string(record_ % store_.table_.num_experts);
}

std::string ExpertStore::Load::read_error(const io::ReadFailure& failure) const {
  if (failure.error == io::kStopped) return "the expert store was closed while it read " + name();
  std::string where = name();
  io::ReadFailure whole = failure;  // reported against the whole range, as the table names it
  const int32_t num_parts = store_.table_.parts_per_record;
  for (int32_t i = 0; i < num_parts; ++i) {
    const RecordPart part = this->part(i);
    if (store_.files_[at(part.file)].get() != failure.file || failure.offset < part.offset ||
        failure.offset >= part.offset + part.length) {
      continue;
    }
    if (num_parts > 1) where += std::string(", matrix ") + kPartNames[at(i)];
    whole.offset = part.offset;
    whole.expected = part.length;
    whole.got = failure.offset - part.offset + failure.got;
    break;
  }
  where += ", file " + failure.file->path() + "\n" + io::describe(whole);
  if (failure.error == 0) {
    return "expert record is short: " + where +
           "\nhint: the file is truncated; run `headrace inspect --verify MODEL`";
  }
  return "expert record cannot be read: " + where +
         "\nhint: check the drive, then run `headrace inspect --verify MODEL`";
}

std::string ExpertStore::Load::weight_error() const {
  int64_t index = first_bad_.load();
  if (index == INT64_MAX) return "";
  int32_t part = 0;
  while (index >= num_values(matrix(store_.table_.layout, part)))
    index -= num_values(matrix(store_.table_.layout, part++));
  const ExpertMatrix& one = matrix(store_.table_.layout, part);
  const RecordPart place = this->part(part);
  return "expert weight is not finite: " + name() + ", matrix " + kPartNames[at(part)] + ", file " +
         store_.files_[at(place.file)]->path() +
         "\nexpected finite values only, got a NaN or infinity at index [" +
         std::to_string(index / one.cols) + ", " + std::to_string(index % one.cols) + "], offset " +
         std::to_string(place.offset + index / one.cols * source(part).row_bytes +
                        index % one.cols * source(part).row_bytes / one.cols) +
         "\nhint: the checkpoint is damaged, or was saved from a run that diverged; run " +
         "`headrace inspect --verify MODEL`";
}

std::string ExpertStore::Load::checksum_error() const {
  const RecordTable& table = store_.table_;
  if (table.checksums.empty()) return "";
  const uint64_t expected = table.checksums[at(record_)];
  const uint64_t got =
      io::checksum({store_.slot_data(slot_), static_cast<size_t>(table.layout.record_bytes)});
  if (got == expected) return "";
  const RecordPart part = this->part(0);
  return "expert record is damaged: " + name() + ", file " + store_.files_[at(part.file)]->path() +
         "\nexpected checksum " + io::hex(expected) + " for " + std::to_string(part.length) +
         " bytes at offset " + std::to_string(part.offset) + ", got " + io::hex(got) +
         "\nhint: run `headrace inspect --verify MODEL`, then convert or copy the model again";
}

}  // namespace headrace::store
