// Threads that read: jobs of many blocks, two priorities, several reads in flight. Large ranges are
// cut into blocks so that one record is read by several threads and a demanded record overtakes an
// advised one between two blocks. The pool knows bytes and files; what a job's bytes mean is the
// job's affair.
//
// Lock order: a job's owner may hold its own lock while it calls submit, raise or cancel; the pool
// never holds its lock while it calls a job.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "io/file.h"
#include "io/memory.h"

namespace headrace::io {

inline constexpr int32_t kMostReaders = 256;

enum class Priority { Demand, Advice };

struct ReadFailure {
  const File* file;
  int64_t offset;    // of the block that failed
  int64_t expected;  // bytes of that block
  int64_t got;
  int error;  // 0: the file ended; kStopped: the pool was stopped first
};
inline constexpr int kStopped = -1;

// One unit of a job: a byte range of a file. With `dest`, the bytes go there; without, they are
// shown to ReadJob::consume in the reading thread's own buffer.
struct ReadBlock {
  File* file;
  int64_t offset;
  int64_t length;
  std::byte* dest;
};

class ReadJob {
 public:
  virtual ~ReadJob() = default;
  virtual int32_t num_blocks() const = 0;
  virtual ReadBlock block(int32_t index) const = 0;
  // The bytes of a block without dest, at any alignment; gone after the call. On a reader thread.
  virtual void consume(int32_t /*index*/, std::byte* /*bytes*/) {}
  // Called exactly once, on a reader thread or by stop(), unless cancel() returned true.
  // `bytes_read` counts what came from the drive, aligned edges included.
  virtual void finished(const std::optional<ReadFailure>& failure, int64_t bytes_read) = 0;

 private:
  friend class ReadPool;
  int32_t next_block_ = 0;  // all four: under the pool's lock
  int32_t num_in_flight_ = 0;
  int64_t bytes_read_ = 0;
  std::optional<ReadFailure> failure_;
};

struct ReadPoolStats {
  int64_t bytes_read;
  int64_t num_reads;  // blocks
  int64_t read_ns;    // summed over reads
  int64_t busy_ns;    // wall time with at least one read in flight
  int32_t in_flight_max;
};

class ReadPool {
 public:
  // 1 to kMostReaders threads. Throws Error(Config) if the system gives fewer.
  explicit ReadPool(int32_t num_threads);
  ~ReadPool();

  void submit(std::shared_ptr<ReadJob> job, Priority priority);
  // Makes an advised job a demanded one. The part already in flight goes on.
  void raise(const std::shared_ptr<ReadJob>& job);
  // True if no block had been started: the job is forgotten and finished() will not be called.
  bool cancel(const std::shared_ptr<ReadJob>& job);
  // Lets the reads in flight end, fails every other job with kStopped, joins the threads.
  void stop();
  ReadPoolStats stats() const;

 private:
  using Clock = std::chrono::steady_clock;
  using Queue = std::deque<std::shared_ptr<ReadJob>>;

  void run();
  std::shared_ptr<ReadJob> front_locked();
  void begin_read_locked();
  void end_read_locked(Clock::time_point started, int64_t bytes);
  int64_t read_block(ReadJob& job, int32_t index, PageBuffer& bounce,
                     std::optional<ReadFailure>& failure);

  mutable std::mutex mutex_;
  std::condition_variable work_;
  Queue demand_, advice_;  // jobs with blocks still to start; a raised job may be in both
  bool stopping_ = false;
  int32_t in_flight_ = 0;
  Clock::time_point busy_since_{};
  ReadPoolStats stats_{};
  std::vector<std::thread> threads_;
};

}  // namespace headrace::io
