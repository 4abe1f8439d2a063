#include "io/read_pool.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <string>
#include <system_error>
#include <utility>

#include "base/error.h"

namespace headrace::io {
namespace {

int64_t to_ns(std::chrono::steady_clock::duration duration) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(duration).count();
}

}  // namespace

ReadPool::ReadPool(int32_t num_threads) {
  if (num_threads < 1 || num_threads > kMostReaders) {
    throw Error(ErrorKind::Config, "readers must be 1 to " + std::to_string(kMostReaders) +
                                       ", got " + std::to_string(num_threads));
  }
  threads_.reserve(static_cast<size_t>(num_threads));
  try {
    for (int32_t i = 0; i < num_threads; ++i) threads_.emplace_back([this] { run(); });
  } catch (const std::system_error& error) {
    stop();
    throw no_threads("reading", num_threads, error);
  }
}

ReadPool::~ReadPool() { stop(); }

void ReadPool::submit(std::shared_ptr<ReadJob> job, Priority priority) {
  const int32_t num_blocks = job->num_blocks();
  {
    const std::scoped_lock lock(mutex_);
    if (!stopping_) {
      (priority == Priority::Demand ? demand_ : advice_).push_back(std::move(job));
    }
  }
  if (job != nullptr) {  // not taken: the pool is stopped
    job->finished(ReadFailure{nullptr, 0, 0, 0, kStopped}, 0);
  } else if (num_blocks > 1) {
    work_.notify_all();
  } else {
    work_.notify_one();
  }
}

void ReadPool::raise(const std::shared_ptr<ReadJob>& job) {
  const std::scoped_lock lock(mutex_);
  if (!stopping_ && job->next_block_ < job->num_blocks()) demand_.push_back(job);
}

bool ReadPool::cancel(const std::shared_ptr<ReadJob>& job) {
  const std::scoped_lock lock(mutex_);
  if (stopping_ || job->next_block_ > 0) return false;
  std::erase(demand_, job);
  std::erase(advice_, job);
  return true;
}

std::shared_ptr<ReadJob> ReadPool::front_locked() {
  for (Queue* queue : {&demand_, &advice_}) {
    while (!queue->empty()) {
      if (queue->front()->next_block_ < queue->front()->num_blocks()) return queue->front();
      queue->pop_front();  // started in full by way of the other queue
    }
  }
  return nullptr;
}

void ReadPool::begin_read_locked() {
  if (in_flight_++ == 0) busy_since_ = Clock::now();
  stats_.in_flight_max = std::max(stats_.in_flight_max, in_flight_);
}

void ReadPool::end_read_locked(Clock::time_point started, int64_t bytes) {
  const Clock::time_point now = Clock::now();
  if (--in_flight_ == 0) stats_.busy_ns += to_ns(now - busy_since_);
  stats_.read_ns += to_ns(now - started);
  stats_.bytes_read += bytes;
  ++stats_.num_reads;
}

void ReadPool::run() {
  PageBuffer bounce;
  std::unique_lock lock(mutex_);
  while (true) {
    std::shared_ptr<ReadJob> job;
    work_.wait(lock, [&] { return (job = front_locked()) != nullptr || stopping_; });
    if (job == nullptr) return;
    const int32_t index = job->next_block_++;
    ++job->num_in_flight_;
    begin_read_locked();
    lock.unlock();

    const Clock::time_point started = Clock::now();
    std::optional<ReadFailure> failure;
    int64_t bytes = 0;
    try {
      bytes = read_block(*job, index, bounce, failure);
    } catch (const Error&) {  // the buffer for unaligned edges could not be had
      const ReadBlock block = job->block(index);
      failure = {block.file, block.offset, block.length, 0, ENOMEM};
    }

    lock.lock();
    end_read_locked(started, bytes);
    job->bytes_read_ += bytes;
    if (failure && !job->failure_) job->failure_ = failure;
    if (job->failure_) job->next_block_ = job->num_blocks();  // no use in the rest
    const bool is_last = --job->num_in_flight_ == 0 && job->next_block_ == job->num_blocks();
    if (is_last) {
      lock.unlock();
      job->finished(job->failure_, job->bytes_read_);
      job.reset();  // its destructor must not run under the lock either
      lock.lock();
    }
  }
}

int64_t ReadPool::read_block(ReadJob& job, int32_t index, PageBuffer& bounce,
                             std::optional<ReadFailure>& failure) {
  const ReadBlock block = job.block(index);
  const bool is_direct_fit =
      is_aligned(block.dest) && block.offset % kAlignment == 0 && block.length % kAlignment == 0;
  if (block.dest != nullptr && (is_direct_fit || !block.file->is_direct())) {
    const ReadResult result = block.file->read(block.dest, block.length, block.offset);
    if (result.bytes < block.length) {
      failure = {block.file, block.offset, block.length, result.bytes, result.error};
    }
    return result.bytes;
  }
  // Read the aligned range around the block aside, then take the block out of it.
  const int64_t start = align_down(block.offset);
  const int64_t length = align_up(block.offset + block.length) - start;
  if (bounce.size_bytes() < length) bounce = PageBuffer(length);
  const ReadResult result = block.file->read(bounce.data(), length, start);
  const int64_t skip = block.offset - start;
  const int64_t got = std::clamp<int64_t>(result.bytes - skip, 0, block.length);
  if (got < block.length) {
    failure = {block.file, block.offset, block.length, got, result.error};
  } else if (block.dest != nullptr) {
    std::memcpy(block.dest, bounce.data() + skip, static_cast<size_t>(block.length));
  } else {
    job.consume(index, bounce.data() + skip);
  }
  return result.bytes;
}

void ReadPool::stop() {
  std::vector<std::shared_ptr<ReadJob>> dropped;
  {
    const std::scoped_lock lock(mutex_);
    stopping_ = true;
    for (Queue* queue : {&demand_, &advice_}) {
      for (std::shared_ptr<ReadJob>& job : *queue) {
        if (job->next_block_ == job->num_blocks()) continue;  // wholly started, or seen already
        job->next_block_ = job->num_blocks();
        if (!job->failure_) job->failure_ = ReadFailure{nullptr, 0, 0, 0, kStopped};
        if (job->num_in_flight_ == 0)
          dropped.push_back(std::move(job));  // else its thread finishes it
      }
      queue->clear();
    }
  }
  work_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
  for (const std::shared_ptr<ReadJob>& job : dropped)
    job->finished(job->failure_, job->bytes_read_);
}

ReadPoolStats ReadPool::stats() const {
  const std::scoped_lock lock(mutex_);
  ReadPoolStats snapshot = stats_;
  if (in_flight_ > 0) snapshot.busy_ns += to_ns(Clock::now() - busy_since_);
  return snapshot;
}

}  // namespace headrace::io
