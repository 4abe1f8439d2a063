#include "io/load.h"

#include <algorithm>
#include <utility>

namespace headrace::io {
namespace {

constexpr int32_t kRowReaders = 4;  // small reads gain from depth; see docs/architecture.md

class RangesJob : public ReadJob {
 public:
  RangesJob(std::span<const Range> ranges, int64_t block_bytes) {
    for (const Range& range : ranges) {
      for (int64_t at = 0; at < range.length; at += block_bytes) {
        blocks_.push_back({range.file, range.offset + at, std::min(block_bytes, range.length - at),
                           range.dest + at});
      }
    }
  }

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
  const auto job = std::make_shared<RangesJob>(ranges, std::max(align_up(block_bytes), kAlignment));
  if (job->num_blocks() == 0) return;
  pool.submit(job, Priority::Demand);
  const std::optional<ReadFailure> failure = job->wait();
  if (!failure) return;
  const std::string path = failure->file != nullptr ? failure->file->path() : std::string("?");
  const bool is_short = failure->error == 0;
  throw Error(kind, std::string(is_short ? "file is short: " : "file cannot be read: ") + path +
                        "\n" + describe(*failure) + "\nhint: " +
                        (is_short ? "the file is truncated; run `headrace inspect --verify MODEL`"
                                  : "check the drive, then run `headrace inspect --verify MODEL`"));
}

RowReader::RowReader(std::string path, int64_t offset, int64_t row_bytes, int64_t num_rows,
                     bool direct)
    : file_(std::move(path), direct, ErrorKind::Checkpoint),
      offset_(offset),
      row_bytes_(row_bytes),
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
