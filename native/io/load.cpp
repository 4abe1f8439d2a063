#include "io/load.h"

#include <algorithm>
#include <utility>

#include "io/checksum.h"

namespace headrace::io {
namespace {

constexpr int32_t kRowReaders = 4;  // small reads gain from depth; see docs/architecture.md

std::vector<ReadBlock> cut(std::span<const Range> ranges, int64_t block_bytes) {
  const int64_t step = std::max(align_up(block_bytes), kAlignment);
  std::vector<ReadBlock> blocks;
  for (const Range& range : ranges) {
    if (range.offset < 0 || range.offset > INT64_MAX - range.length) {
      throw Error(ErrorKind::Shape, "offset out of range: " + std::to_string(range.offset) +
                                        " of file " + range.file->path());
    }
    for (int64_t at = 0; at < range.length; at += step) {
      blocks.push_back(
          {range.file, range.offset + at, std::min(step, range.length - at), range.dest + at});
    }
  }
  return blocks;
}

class RangesJob : public ReadJob {
 public:
  RangesJob(std::span<const Range> ranges, int64_t block_bytes)
      : blocks_(cut(ranges, block_bytes)) {}

  int32_t num_blocks() const override { return static_cast<int32_t>(blocks_.size()); }
  ReadBlock block(int32_t index) const override { return blocks_[static_cast<size_t>(index)]; }

  void finished(const std::optional<ReadFailure>& failure, int64_t) override {
    const std::scoped_lock lock(mutex_);
    failure_ = failure;
    is_finished_ = true;
    done_.notify_all();
  }

  std::optional<ReadFailure> wait() {
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return is_finished_; });
    return failure_;
  }

 private:
  std::vector<ReadBlock> blocks_;
  std::mutex mutex_;
  std::condition_variable done_;
  bool is_finished_ = false;
  std::optional<ReadFailure> failure_;
};

std::string failure_text(const ReadFailure& failure, const std::string& what) {
  const bool is_short = failure.error == 0;
  return std::string(is_short ? "file is short: " : "file cannot be read: ") + what + "\n" +
         describe(failure) + "\nhint: " +
         (is_short ? "the file is truncated; run `headrace inspect --verify MODEL`"
                   : "check the drive, then run `headrace inspect --verify MODEL`");
}

// What the named ranges of one call have come to.
class Outcome {
 public:
  explicit Outcome(size_t count) : num_left_(count), errors_(count) {}

  void finish(size_t index, std::string error) {
    const std::scoped_lock lock(mutex_);
    has_failed_ = has_failed_ || !error.empty();
    errors_[index] = std::move(error);
    --num_left_;
    changed_.notify_all();
  }

  // Until all is there, or something failed.
  void wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return num_left_ == 0 || has_failed_; });
  }

  // After the readers were stopped.
  void throw_first() const {
    for (const std::string& error : errors_) {
      if (!error.empty()) throw Error(ErrorKind::Checkpoint, error);
    }
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  size_t num_left_;
  bool has_failed_ = false;
  std::vector<std::string> errors_;
};

class NamedJob : public ReadJob {
 public:
  NamedJob(const NamedRange& named, size_t index, int64_t block_bytes, Outcome& outcome)
      : named_(named),
        index_(index),
        blocks_(cut({&named.range, 1}, block_bytes)),
        outcome_(outcome) {}

  int32_t num_blocks() const override { return static_cast<int32_t>(blocks_.size()); }
  ReadBlock block(int32_t index) const override { return blocks_[static_cast<size_t>(index)]; }

  void finished(const std::optional<ReadFailure>& failure, int64_t) override {
    if (failure && failure->error == kStopped) return;  // another range failed before
    outcome_.finish(index_, failure ? failure_text(*failure, place()) : checksum_error());
  }

 private:
  std::string place() const { return named_.name + ", file " + named_.range.file->path(); }

  std::string checksum_error() const {
    if (!named_.checksum) return "";
    const uint64_t got = checksum({named_.range.dest, static_cast<size_t>(named_.checked_bytes)});
    if (got == *named_.checksum) return "";
    return "checksum differs: " + place() + "\nexpected " + hex(*named_.checksum) + " for " +
           std::to_string(named_.checked_bytes) + " bytes at offset " +
           std::to_string(named_.range.offset) + ", got " + hex(got) +
           "\nhint: the file is damaged; convert the model again";
  }

  const NamedRange& named_;
  size_t index_;
  std::vector<ReadBlock> blocks_;
  Outcome& outcome_;
};

}  // namespace

std::string describe(const ReadFailure& failure) {
  std::string text = "expected " + std::to_string(failure.expected) + " bytes at offset " +
                     std::to_string(failure.offset) + ", got " + std::to_string(failure.got);
  if (failure.error == kStopped) return "the readers were stopped";
  if (failure.error != 0) text += ": " + error_text(failure.error);
  return text;
}

void read_ranges(ReadPool& pool, std::span<const Range> ranges, int64_t block_bytes,
                 ErrorKind kind) {
  const auto job = std::make_shared<RangesJob>(ranges, block_bytes);
  if (job->num_blocks() == 0) return;
  pool.submit(job, Priority::Demand);
  const std::optional<ReadFailure> failure = job->wait();
  if (!failure) return;
  const std::string path = failure->file != nullptr ? failure->file->path() : std::string("?");
  throw Error(kind, failure_text(*failure, path));
}

void read_named_ranges(std::span<const NamedRange> ranges, int32_t num_readers,
                       int64_t block_bytes) {
  Outcome outcome(ranges.size());
  ReadPool pool(num_readers);
  for (size_t i = 0; i < ranges.size(); ++i) {
    const auto job = std::make_shared<NamedJob>(ranges[i], i, block_bytes, outcome);
    if (job->num_blocks() == 0) {
      job->finished(std::nullopt, 0);
    } else {
      pool.submit(job, Priority::Demand);
    }
  }
  outcome.wait();
  pool.stop();
  outcome.throw_first();
}

namespace {

int64_t checked_row_bytes(int64_t offset, int64_t row_bytes, int64_t num_rows) {
  if (offset < 0 || row_bytes < 1 || num_rows > (INT64_MAX - offset) / row_bytes) {
    throw Error(ErrorKind::Shape, "rows of " + std::to_string(row_bytes) + " bytes from offset " +
                                      std::to_string(offset) + " on are no table");
  }
  return row_bytes;
}

}  // namespace

RowReader::RowReader(std::string path, int64_t offset, int64_t row_bytes, int64_t num_rows,
                     bool direct)
    : file_(std::move(path), direct, ErrorKind::Checkpoint),
      offset_(offset),
      row_bytes_(checked_row_bytes(offset, row_bytes, num_rows)),
      num_rows_(num_rows >= 0 ? num_rows
                              : std::max<int64_t>(0, file_.size_bytes() - offset) / row_bytes),
      pool_(kRowReaders) {}

void RowReader::read(std::span<const int32_t> ids, std::byte* dest) {
  std::vector<Range> ranges;
  ranges.reserve(ids.size());
  for (const int32_t id : ids) {
    if (id < 0 || id >= num_rows_) {
      throw Error(ErrorKind::Request, "row id out of range: " + std::to_string(id) +
                                          "\nexpected 0 to " + std::to_string(num_rows_ - 1));
    }
    ranges.push_back({&file_, offset_ + id * row_bytes_, row_bytes_, dest});
    dest += row_bytes_;
  }
  read_ranges(pool_, ranges, kDefaultBlockBytes, ErrorKind::Checkpoint);
}

}  // namespace headrace::io
