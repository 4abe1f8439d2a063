#include "base/thread_pool.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <system_error>

#include "base/error.h"

#if defined(__x86_64__) || defined(_M_X64)
#include <emmintrin.h>
#endif

namespace headrace {
namespace {

// A layer's ops follow each other within tens of microseconds; longer spinning only takes the core
// from others.
constexpr std::chrono::microseconds kIdleSpin{100};
// Inside a job nobody should be late by more than an item, a few microseconds.
constexpr std::chrono::microseconds kWaitSpin{30};

constexpr uint32_t kOpen = 1;
constexpr uint32_t kOneJoined = 2;
constexpr uint32_t kJoinedBits = 10;
constexpr uint32_t kGenerationShift = 1 + kJoinedBits;

uint32_t num_joined(uint32_t job) { return (job >> 1) & ((1u << kJoinedBits) - 1); }
uint32_t generation(uint32_t job) { return job >> kGenerationShift; }

void relax() {
#if defined(__x86_64__) || defined(_M_X64)
  _mm_pause();
#elif defined(__aarch64__) && defined(__GNUC__)
  asm volatile("yield");
#endif
}

template <class Condition>
bool spin_until(std::chrono::microseconds limit, Condition&& is_met) {
  const auto end = std::chrono::steady_clock::now() + limit;
  do {
    for (int i = 0; i < 16; ++i) {
      if (is_met()) return true;
      relax();
    }
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

uint64_t packed(int64_t begin, int64_t end) {
  return static_cast<uint64_t>(end) << 32 | static_cast<uint64_t>(begin);
}
int64_t begin_of(uint64_t range) { return static_cast<int64_t>(range & UINT32_MAX); }
int64_t end_of(uint64_t range) { return static_cast<int64_t>(range >> 32); }
int64_t num_left(uint64_t range) { return end_of(range) - begin_of(range); }

}  // namespace

void wait_for_change(const std::atomic<uint32_t>& word, uint32_t seen) {
  if (spin_until(kWaitSpin, [&] { return word.load() != seen; })) return;
  word.wait(seen);
}

// Shares

void Shares::deal(int64_t count) {
  for (int64_t t = 0; t < num_threads_; ++t) {
    parts_[t].range.store(packed(count * t / num_threads_, count * (t + 1) / num_threads_),
                          std::memory_order_relaxed);
  }
}

void Shares::deal_to(int32_t thread, int64_t count) {
  for (int32_t t = 0; t < num_threads_; ++t) {
    parts_[t].range.store(packed(0, t == thread ? count : 0), std::memory_order_relaxed);
  }
}

Shares::Items Shares::take(int32_t thread) {
  std::atomic<uint64_t>& own = parts_[thread].range;
  uint64_t range = own.load();
  while (num_left(range) > 0) {
    const int64_t next = begin_of(range) + (num_left(range) + 3) / 4;
    if (own.compare_exchange_weak(range, packed(next, end_of(range)))) {
      return {begin_of(range), next};
    }
  }
  return steal(thread);
}

// No item is dealt twice, so a range that was seen once never comes back with other items behind
// it, and an exchange that succeeds took what was seen.
Shares::Items Shares::steal(int32_t thread) {
  for (;;) {
    int32_t richest = -1;
    uint64_t range = 0;
    for (int32_t t = 0; t < num_threads_; ++t) {
      const uint64_t other = parts_[t].range.load();
      if (num_left(other) > num_left(range)) {
        richest = t;
        range = other;
      }
    }
    if (richest < 0) return {0, 0};
    const int64_t end = end_of(range);
    const int64_t first = end - (num_left(range) + 1) / 2;
    if (!parts_[richest].range.compare_exchange_strong(range, packed(begin_of(range), first))) {
      continue;
    }
    const int64_t next = first + (end - first + 3) / 4;
    parts_[thread].range.store(packed(next, end));
    return {first, next};
  }
}

// The pool

ThreadPool::ThreadPool(int32_t num_threads)
    : parts_(std::make_unique<Shares::Part[]>(num_threads)), shares_(parts_.get(), num_threads) {
  try {
    for (int32_t i = 1; i < num_threads; ++i) workers_.emplace_back([this] { work(); });
  } catch (const std::system_error& error) {
    stop();
    throw no_threads("computing", num_threads, error);
  }
}

ThreadPool::~ThreadPool() { stop(); }

void ThreadPool::stop() {
  stopping_.store(true);
  job_.fetch_add(1u << kGenerationShift);
  job_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::open(Function function, void* context) {
  if (workers_.empty()) return;
  function_ = function;
  context_ = context;
  left_.store(0);
  job_.store((generation(job_.load()) + 1) << kGenerationShift | kOpen);
  job_.notify_all();
}

void ThreadPool::close() {
  if (workers_.empty()) return;
  const uint32_t joined = num_joined(job_.fetch_sub(kOpen));
  for (uint32_t left; (left = left_.load()) != joined;) wait_for_change(left_, left);
}

// Takes part in the open job, unless it took part before; `last` is that job's generation.
bool ThreadPool::join(uint32_t& last) {
  uint32_t job = job_.load();
  while ((job & kOpen) != 0 && generation(job) != last) {
    if (!job_.compare_exchange_weak(job, job + kOneJoined)) continue;
    last = generation(job);
    function_(context_, static_cast<int32_t>(num_joined(job)) + 1);
    left_.fetch_add(1);
    left_.notify_all();
    return true;
  }
  return false;
}

void ThreadPool::work() {
  uint32_t last = 0;
  while (!stopping_.load()) {
    if (spin_until(kIdleSpin, [&] { return join(last) || stopping_.load(); })) continue;
    // A job opened after `seen` was read changes the word, and opening notifies.
    const uint32_t seen = job_.load();
    if (!join(last) && !stopping_.load()) job_.wait(seen);
  }
}

namespace {

int32_t default_num_threads() {
  return std::max(1, static_cast<int32_t>(std::thread::hardware_concurrency()));
}

struct Shared {
  Shared();

  std::mutex mutex;
  std::shared_ptr<ThreadPool> pool;
  int32_t num_threads = default_num_threads();  // of the next pool
};

Shared& shared() {
  static Shared instance;
  return instance;
}

// A fork has the pool without its threads, which nobody can join: it makes one of its own when it
// computes, and never takes the copy down.
void leave_pool() {
  new std::shared_ptr<ThreadPool>(std::move(shared().pool));
  shared().mutex.unlock();
}

Shared::Shared() {
  pthread_atfork([] { shared().mutex.lock(); }, [] { shared().mutex.unlock(); }, &leave_pool);
}

}  // namespace

std::shared_ptr<ThreadPool> shared_pool() {
  Shared& state = shared();
  const std::lock_guard<std::mutex> lock(state.mutex);
  if (!state.pool) state.pool = std::make_shared<ThreadPool>(state.num_threads);
  return state.pool;
}

void set_num_threads(int32_t num_threads) {
  if (num_threads < 0 || num_threads > 1024) {
    throw Error(ErrorKind::Config,
                "threads out of range\nexpected 0 (all processors) to 1024, got " +
                    std::to_string(num_threads));
  }
  Shared& state = shared();
  const int32_t count = num_threads == 0 ? default_num_threads() : num_threads;
  auto fresh = std::make_shared<ThreadPool>(count);
  const std::lock_guard<std::mutex> lock(state.mutex);
  state.num_threads = count;
  state.pool.swap(fresh);
}

}  // namespace headrace
