#include "store/load.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <tuple>
#include <utility>

#include "io/checksum.h"

namespace headrace::store {
namespace {

constexpr int32_t kMostLayers = 1 << 20;  // a table by layer is made
constexpr int32_t kBlockOutputs = 16;     // outputs are interleaved by 16: see kernels/format.h
// Bytes between two tensors that are read along rather than asked around: what a drive gives in
// less time than a read of its own takes.
constexpr int64_t kMergedGap = 16 << 10;
constexpr std::array<const char*, 3> kPartNames{"gate", "up", "down"};

size_t at(int64_t value) { return static_cast<size_t>(value); }

int64_t num_values(const RowSource& source) { return int64_t{source.rows} * source.row_values; }

// How a part of a record in place stands in its file.
const RowSource& row_source(const RecordTable& table, int32_t record, int32_t part) {
  return table.sources[at(record / table.num_experts * table.parts_per_record + part)];
}

// For a message: which matrix holds the value at a row-major index of a tensor.
std::string matrix_name(const RowSource& source, int64_t index) {
  return std::string(", matrix ") + kPartNames[at(source.packer->matrix_at(source.matrix, index))];
}

// Rows of one block of a record in place: whole granules, about block_bytes.
int32_t rows_per_block(const RowSource& source, int64_t block_bytes) {
  const int64_t granules = block_bytes / (source.row_bytes * source.granule);
  const int64_t all = (source.rows + source.granule - 1) / source.granule;
  return static_cast<int32_t>(std::clamp<int64_t>(granules, 1, all)) * source.granule;
}

int64_t end_of(const RecordPart& part) { return part.offset + part.length; }

// Length of each block but the last of a packed record: equal shares, so that no reader is left
// with a short end while another still reads a full block.
int64_t packed_block_bytes(int64_t length, int64_t block_bytes) {
  const int64_t count = (length + block_bytes - 1) / block_bytes;
  return io::align_up((length + count - 1) / count);
}

[[noreturn]] void fail(const std::string& message) {
  throw Error(ErrorKind::Checkpoint, "expert table is inconsistent: " + message);
}

// Whether the tensors of every layer's matrices can be read.
void check_sources(const RecordTable& table) {
  const size_t parts = at(table.parts_per_record);
  if (parts == 0 || table.sources.size() != table.layers.size() * parts) {
    fail("sources of rows are missing");
  }
  if (!table.factors.empty() && table.factors.size() != table.parts.size() / parts * 3) {
    fail("factors are missing");
  }
  for (size_t i = 0; i < table.sources.size(); ++i) {
    const RowSource& source = table.sources[i];
    if (source.matrix < 0 || source.matrix > 2 || source.rows <= 0 || source.row_bytes <= 0 ||
        source.row_values <= 0 || source.granule <= 0 || source.alignment <= 0 ||
        source.packer == nullptr) {
      fail("part " + std::to_string(i % parts) + " of a record cannot be read in place");
    }
  }
}

void check_layout(const ExpertLayout& layout) {
  const int64_t record_bytes = layout.record_bytes;
  if (record_bytes <= 0 || record_bytes % io::kAlignment != 0) {
    fail("record size " + std::to_string(record_bytes) + " is not a multiple of 4096");
  }
  for (int32_t part = 0; part < 3; ++part) {
    const ExpertMatrix& one = layout.matrix(part);
    if (one.rows <= 0 || one.cols <= 0 || one.offset < 0 || one.offset % 64 != 0 ||
        one.offset >= record_bytes) {
      fail(std::string("matrix ") + kPartNames[at(part)] + " does not fit the record");
    }
  }
}

}  // namespace

void check_table(const RecordTable& table) {
  const bool is_in_place = table.is_in_place();
  const size_t num_records = table.layers.size() * at(std::max(table.num_experts, 0));
  if (num_records == 0) fail("it holds no record");
  if (!is_in_place && table.parts_per_record != 1) {
    fail("expected 1 range per record, got " + std::to_string(table.parts_per_record));
  }
  if (table.parts.size() != num_records * at(table.parts_per_record)) fail("ranges are missing");
  if (!table.checksums.empty() && table.checksums.size() != num_records)
    fail("checksums are missing");
  for (const int32_t layer : table.layers) {
    if (layer < 0 || layer >= kMostLayers) fail("a layer has the number " + std::to_string(layer));
  }
  if (table.layouts.size() != table.layers.size()) fail("layouts are missing");
  for (const ExpertLayout& layout : table.layouts) check_layout(layout);
  if (is_in_place) check_sources(table);
  for (size_t i = 0; i < table.parts.size(); ++i) {
    const RecordPart& part = table.parts[i];
    const int32_t width = table.parts_per_record;
    const auto index = static_cast<int32_t>(i);
    int64_t expected = table.layout_of(index / width).record_bytes;
    if (is_in_place) {
      const RowSource& source = row_source(table, index / width, index % width);
      expected = source.rows * source.row_bytes;
    }
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
                        std::span<const RecordShare> shares, const Load* before)
    : store_(store),
      record_(record),
      slot_(slot),
      priority_(priority),
      shares_(shares.begin(), shares.end()),
      num_running_(shares.size()) {
  if (store.table_.is_in_place()) cut_in_place();
  jobs_.reserve(shares.size());  // jobs() points into it
  for (const RecordShare& share : shares) jobs_.emplace_back(*this, share);
  if (before == nullptr) return;
  tried_ = before->tried_;
  doubts_ = before->doubts_;
  is_joined_ = before->is_joined_;
}

Drives::Jobs ExpertStore::Load::jobs(const std::shared_ptr<Load>& load) {
  Drives::Jobs jobs;
  for (Share& share : load->jobs_) jobs.emplace_back(load, &share);
  return jobs;
}

ExpertStore::Load::Share::Share(Load& load, const RecordShare& range) : load_(load), range_(range) {
  const int64_t block_bytes = load.store_.options_.block_bytes;
  if (!load.store_.table_.is_in_place()) {
    const int64_t step = packed_block_bytes(range.length, block_bytes);
    num_blocks_ = static_cast<int32_t>((range.length + step - 1) / step);
  } else {
    num_blocks_ = static_cast<int32_t>(load.pieces_.size());
  }
}

// Tensors that lie close together and are no more than a block come in one read; larger ones are
// cut between rows.
void ExpertStore::Load::cut_in_place() {
  const std::span<const RecordPart> parts = store_.parts(record_);
  order_.resize(parts.size());
  std::iota(order_.begin(), order_.end(), 0);
  std::sort(order_.begin(), order_.end(), [&](int32_t a, int32_t b) {
    const RecordPart &one = parts[at(a)], &other = parts[at(b)];
    return std::tie(one.file, one.offset, a) < std::tie(other.file, other.offset, b);
  });
  const auto joins = [&](int32_t begin, int32_t i) {
    const RecordPart& last = parts[at(order_[at(i - 1)])];
    const RecordPart& next = parts[at(order_[at(i)])];
    const int64_t gap = next.offset - end_of(last);
    return next.file == last.file && gap >= 0 && gap <= kMergedGap &&
           end_of(next) - parts[at(order_[at(begin)])].offset <= store_.options_.block_bytes;
  };
  const auto num_parts = static_cast<int32_t>(parts.size());
  int32_t begin = 0;
  for (int32_t i = 1; i <= num_parts; ++i) {
    if (i < num_parts && joins(begin, i)) continue;
    cut_parts(begin, i);
    begin = i;
  }
  // Gate and up are asked for first, wherever they lie.
  const auto least = [&](const Piece& piece) {
    return *std::min_element(order_.begin() + piece.begin, order_.begin() + piece.end);
  };
  std::stable_sort(pieces_.begin(), pieces_.end(),
                   [&](const Piece& a, const Piece& b) { return least(a) < least(b); });
}

void ExpertStore::Load::cut_parts(int32_t begin, int32_t end) {
  if (end - begin > 1) {
    pieces_.push_back({begin, end, 0, 0});
    return;
  }
  const RowSource& from = source(order_[at(begin)]);
  const int32_t step = rows_per_block(from, store_.options_.block_bytes);
  for (int32_t first = 0; first < from.rows; first += step) {
    pieces_.push_back({begin, end, first, std::min(step, from.rows - first)});
  }
}

const RowSource& ExpertStore::Load::source(int32_t part) const {
  return row_source(store_.table_, record_, part);
}

RecordPart ExpertStore::Load::part(int32_t place, int32_t index) const {
  if (place == 0) return store_.parts(record_)[at(index)];
  const RecordCopy& copy = store_.readers_->copy(record_, place);
  return {copy.file, copy.offset, store_.table_.layout_of(record_).record_bytes};
}

io::ReadBlock ExpertStore::Load::Share::block(int32_t index) const {
  const ExpertStore& store = load_.store_;
  if (!store.table_.is_in_place()) {
    const RecordPart whole = load_.part(range_.place, 0);
    const int64_t step = packed_block_bytes(range_.length, store.options_.block_bytes);
    const int64_t start = range_.start + index * step;
    return {store.files_[at(whole.file)].get(), whole.offset + start,
            std::min(step, range_.start + range_.length - start),
            store.slot_data(load_.slot_) + start};
  }
  const Piece& piece = load_.pieces_[at(index)];
  const int32_t number = load_.order_[at(piece.begin)];
  const RecordPart first = load_.part(range_.place, number);
  io::File* const file = store.files_[at(first.file)].get();
  if (piece.end - piece.begin > 1) {
    const RecordPart last = load_.part(range_.place, load_.order_[at(piece.end - 1)]);
    return {file, first.offset, end_of(last) - first.offset, nullptr};
  }
  const int64_t bytes = load_.source(number).row_bytes;
  return {file, first.offset + piece.first * bytes, piece.count * bytes, nullptr};
}

void ExpertStore::Load::Share::consume(int32_t index, std::byte* bytes) {
  const Piece& piece = load_.pieces_[at(index)];
  const int32_t number = load_.order_[at(piece.begin)];
  if (piece.end - piece.begin == 1) {
    load_.pack(number, piece.first, piece.count, bytes);
    return;
  }
  const int64_t start = load_.part(range_.place, number).offset;
  for (int32_t i = piece.begin; i < piece.end; ++i) {  // ascending: `pack` may move bytes down
    const int32_t one = load_.order_[at(i)];
    load_.pack(one, 0, load_.source(one).rows,
               bytes + (load_.part(range_.place, one).offset - start));
  }
}

void ExpertStore::Load::pack(int32_t part, int32_t first, int32_t count, std::byte* bytes) {
  const RowSource& from = source(part);
  const RecordTable& table = store_.table_;
  // A file may place a tensor at an odd offset; the bytes before it are not needed any more.
  const int64_t misfit =
      static_cast<int64_t>(reinterpret_cast<uintptr_t>(bytes) % at(from.alignment));
  if (misfit != 0) {
    std::memmove(bytes - misfit, bytes, at(count * from.row_bytes));
    bytes -= misfit;
  }
  const ExpertMatrix& one = table.layout_of(record_).matrix(from.matrix);
  const float factor =
      table.factors.empty() ? 1.0f : table.factors[at(int64_t{record_} * 3 + from.matrix)];
  const int64_t bad =
      from.packer->pack(bytes, factor, one, first, count, store_.slot_data(slot_) + one.offset);
  if (bad >= 0) note_bad_value(part, int64_t{first} * from.row_values + bad);
}

void ExpertStore::Load::note_bad_value(int32_t part, int64_t index) {
  for (int32_t before = 0; before < part; ++before) index += num_values(source(before));
  first_bad_.report(index);
}

void ExpertStore::Load::finish_matrices() {
  if (store_.table_.finish == nullptr) return;
  for (int32_t i = 0; i < 3; ++i) {
    const ExpertMatrix& one = store_.table_.layout_of(record_).matrix(i);
    store_.table_.finish(one, store_.slot_data(slot_) + one.offset);
  }
}

void ExpertStore::Load::Share::finished(const std::optional<io::ReadFailure>& failure,
                                        int64_t bytes_read) {
  failure_ = failure;
  bytes_read_ = bytes_read;
  load_.ended(*this);
}

void ExpertStore::Load::ended(Share& share) {
  if (!store_.share_ended(*this, share)) return;
  std::string error = judge();
  if (error.empty()) finish_matrices();
  int64_t bytes_read = 0;
  for (const Share& job : jobs_) bytes_read += job.bytes_read_;
  store_.loaded(*this, std::move(error), bytes_read);
}

std::string ExpertStore::Load::judge() {
  const auto blame = [this](int32_t place, bool is_damaged, std::string error) {
    tried_ |= Drives::Places{1} << place;
    failures_.push_back({place, is_damaged, std::move(error)});
  };
  for (const Share& job : jobs_) {
    if (job.failure_) blame(job.range_.place, false, read_error(*job.failure_, job.range_.place));
  }
  if (!failures_.empty()) return failures_.front().error;
  const std::vector<uint64_t>& checksums = store_.table_.checksums;
  std::string error = value_error();
  if (error.empty() && !checksums.empty()) {
    const uint64_t got = io::checksum(bytes({0, 0, store_.table_.layout_of(record_).record_bytes}));
    if (got == checksums[at(record_)]) {
      settle_doubts();
      return "";
    }
    error = checksum_error(shares_.front().place, got);
    if (shares_.size() > 1) {
      for (const RecordShare& share : shares_)
        doubts_.push_back({share, io::checksum(bytes(share)), checksum_error(share.place, got)});
      return error;
    }
  }
  if (!error.empty()) blame(shares_.front().place, true, error);
  return error;
}

// The whole record is here now, and right: what came differently before was damaged.
void ExpertStore::Load::settle_doubts() {
  for (const Doubt& doubt : doubts_) {
    const bool is_known = (tried_ >> doubt.share.place & 1) != 0;
    if (!is_known && io::checksum(bytes(doubt.share)) != doubt.checksum)
      failures_.push_back({doubt.share.place, true, doubt.error});
  }
}

std::span<const std::byte> ExpertStore::Load::bytes(const RecordShare& share) const {
  return {store_.slot_data(slot_) + share.start, at(share.length)};
}

std::string ExpertStore::Load::name() const {
  const int32_t row = record_ / store_.table_.num_experts;
  return "layer " + std::to_string(store_.table_.layers[at(row)]) + ", expert " +
         std::to_string(record_ % store_.table_.num_experts);
}

std::string ExpertStore::Load::read_error(const io::ReadFailure& failure, int32_t place) const {
  if (failure.error == io::kStopped) return "the expert store was closed while it read " + name();
  std::string where = name();
  io::ReadFailure whole = failure;  // reported against the whole range, as the table names it
  const int32_t num_parts = store_.table_.parts_per_record;
  // A block may hold several parts and what lies between them: the first that lacks bytes counts.
  const int64_t reached = failure.offset + failure.got;
  int32_t found = -1;
  for (int32_t i = 0; i < num_parts; ++i) {
    const RecordPart part = this->part(place, i);
    if (store_.files_[at(part.file)].get() != failure.file || end_of(part) <= reached) continue;
    if (found < 0 || part.offset < this->part(place, found).offset) found = i;
  }
  if (found >= 0) {
    const RecordPart part = this->part(place, found);
    if (num_parts > 1) {
      const RowSource& from = source(found);
      const int64_t missing = std::max<int64_t>(reached - part.offset, 0);  // the first such byte
      const int64_t row = missing / from.row_bytes;
      const int64_t column = missing % from.row_bytes * from.row_values / from.row_bytes;
      where += matrix_name(from, row * from.row_values + column);
    }
    whole.offset = part.offset;
    whole.expected = part.length;
    whole.got = std::max<int64_t>(reached - part.offset, 0);
  }
  where += ", file " + failure.file->path() + "\n" + io::describe(whole);
  if (failure.error == 0) {
    return "expert record is short: " + where +
           "\nhint: the file is truncated; run `headrace inspect --verify MODEL`";
  }
  return "expert record cannot be read: " + where +
         "\nhint: check the drive, then run `headrace inspect --verify MODEL`";
}

std::string ExpertStore::Load::value_error() const {
  int64_t index = first_bad_.get();
  if (index == FirstIndex::kNone) return "";
  int32_t part = 0;
  while (index >= num_values(source(part))) index -= num_values(source(part++));
  const RowSource& from = source(part);
  const RecordPart place = this->part(0, part);
  const int64_t row = index / from.row_values, column = index % from.row_values;
  const RowPacker::Complaint complaint = from.packer->complaint();
  return std::string(complaint.title) + ": " + name() + matrix_name(from, index) + ", file " +
         store_.files_[at(place.file)]->path() + "\n" + complaint.expected + " at index [" +
         std::to_string(row) + ", " + std::to_string(column) + "], offset " +
         std::to_string(place.offset + row * from.row_bytes +
                        column * from.row_bytes / from.row_values) +
         "\nhint: " + complaint.hint;
}

std::string ExpertStore::Load::checksum_error(int32_t place, uint64_t got) const {
  const RecordPart part = this->part(place, 0);
  return "expert record is damaged: " + name() + ", file " + store_.files_[at(part.file)]->path() +
         "\nexpected checksum " + io::hex(store_.table_.checksums[at(record_)]) + " for " +
         std::to_string(part.length) + " bytes at offset " + std::to_string(part.offset) +
         ", got " + io::hex(got) +
         "\nhint: run `headrace inspect --verify MODEL`, then convert or copy the model again";
}

}  // namespace headrace::store
