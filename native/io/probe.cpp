#include "io/probe.h"

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "io/checksum.h"
#include "io/load.h"

namespace headrace::io {
namespace {

// Counts records down; keeps the first failure.
class Countdown {
 public:
  explicit Countdown(size_t count) : left_(count) {}

  void finish(const std::optional<ReadFailure>& failure, uint64_t checksum) {
    const std::scoped_lock lock(mutex_);
    if (failure && !failure_) failure_ = failure;
    checksum_ ^= checksum;  // kept, so that no compiler may leave the sum out
    if (--left_ == 0) done_.notify_all();
  }

  std::optional<ReadFailure> wait() {
    std::unique_lock lock(mutex_);
    done_.wait(lock, [this] { return left_ == 0; });
    return failure_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable done_;
  size_t left_;
  uint64_t checksum_ = 0;
  std::optional<ReadFailure> failure_;
};

// One record, read into a slot that other records use, too: what the bytes are does not matter.
class RecordJob : public ReadJob {
 public:
  RecordJob(File* file, int64_t offset, int64_t record_bytes, int64_t block_bytes, std::byte* slot,
            bool with_checksum, Countdown& countdown)
      : file_(file),
        offset_(offset),
        record_bytes_(record_bytes),
        block_bytes_(block_bytes),
        slot_(slot),
        with_checksum_(with_checksum),
        countdown_(countdown) {}

  int32_t num_blocks() const override {
    return static_cast<int32_t>((record_bytes_ + block_bytes_ - 1) / block_bytes_);
  }

  ReadBlock block(int32_t index) const override {
    const int64_t at = index * block_bytes_;
    return {file_, offset_ + at, std::min(block_bytes_, record_bytes_ - at), slot_ + at};
  }

  void finished(const std::optional<ReadFailure>& failure, int64_t) override {
    uint64_t sum = 0;
    if (with_checksum_) sum = checksum({slot_, static_cast<size_t>(record_bytes_)});
    countdown_.finish(failure, sum);
  }

 private:
  File* file_;
  int64_t offset_;
  int64_t record_bytes_;
  int64_t block_bytes_;
  std::byte* slot_;
  bool with_checksum_;
  Countdown& countdown_;
};

int64_t ns_since(std::chrono::steady_clock::time_point start) {
  const auto elapsed = std::chrono::steady_clock::now() - start;
  return std::chrono::duration_cast<std::chrono::nanoseconds>(elapsed).count();
}

}  // namespace

ProbeResult probe_reads(std::span<const std::string> paths, std::span<const ProbePlace> places,
                        int64_t record_bytes, int64_t block_bytes, int32_t readers, bool direct,
                        bool with_checksum) {
  std::vector<std::unique_ptr<File>> files;
  for (const std::string& path : paths) {
    files.push_back(std::make_unique<File>(path, direct, ErrorKind::Checkpoint));
  }
  const int64_t num_slots = readers + 1;
  PageBuffer slots(num_slots * record_bytes);
  std::memset(slots.data(), 1, static_cast<size_t>(slots.size_bytes()));

  Countdown countdown(places.size());
  ReadPool pool(readers);
  const auto start = std::chrono::steady_clock::now();
  for (size_t i = 0; i < places.size(); ++i) {
    std::byte* slot = slots.data() + static_cast<int64_t>(i) % num_slots * record_bytes;
    File* file = files[static_cast<size_t>(places[i].file)].get();
    pool.submit(std::make_shared<RecordJob>(file, places[i].offset, record_bytes, block_bytes, slot,
                                            with_checksum, countdown),
                Priority::Demand);
  }
  const std::optional<ReadFailure> failure = places.empty() ? std::nullopt : countdown.wait();
  const int64_t elapsed_ns = ns_since(start);
  pool.stop();
  if (failure) {
    throw Error(ErrorKind::Checkpoint,
                "file cannot be read: " +
                    (failure->file != nullptr ? failure->file->path() : std::string("?")) + "\n" +
                    describe(*failure) + "\nhint: check the drive");
  }
  const ReadPoolStats stats = pool.stats();
  const bool is_direct =
      std::all_of(files.begin(), files.end(), [](const auto& file) { return file->is_direct(); });
  return {static_cast<int64_t>(places.size()) * record_bytes, elapsed_ns, stats.num_reads,
          stats.read_ns, is_direct};
}

}  // namespace headrace::io
