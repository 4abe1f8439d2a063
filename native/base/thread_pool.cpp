#include "base/thread_pool.h"

#include <algorithm>

#include "base/error.h"

#if defined(__x86_64__) || defined(_M_X64)
#include <emmintrin.h>
#endif

namespace headrace {
namespace {

constexpr uint64_t kFieldBits = 20;
constexpr uint64_t kFieldMask = (uint64_t{1} << kFieldBits) - 1;
// A layer's ops follow each other within tens of microseconds; longer spinning only takes the core
// from others.
constexpr int kSpins = 4000;

uint64_t next_task(uint64_t ticket) { return ticket & kFieldMask; }
uint64_t task_count(uint64_t ticket) { return (ticket >> kFieldBits) & kFieldMask; }

void relax() {
#if defined(__x86_64__) || defined(_M_X64)
  _mm_pause();
#elif defined(__aarch64__) && defined(__GNUC__)
  asm volatile("yield");
#endif
}

}  // namespace

ThreadPool::ThreadPool(int32_t num_threads) {
  for (int32_t i = 1; i < num_threads; ++i) workers_.emplace_back([this] { work(); });
}

ThreadPool::~ThreadPool() {
  stopping_.store(true);
  wake_.fetch_add(1);
  wake_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

bool ThreadPool::run_one_task() {
  uint64_t ticket = ticket_.load();
  while (next_task(ticket) < task_count(ticket)) {
    if (!ticket_.compare_exchange_weak(ticket, ticket + 1)) continue;
    const int64_t begin = static_cast<int64_t>(next_task(ticket)) * chunk_;
    const int64_t end = std::min(begin + chunk_, num_tasks_);
    for (int64_t i = begin; i < end; ++i) function_(context_, i);
    unfinished_.fetch_sub(1);
    return true;
  }
  return false;
}

void ThreadPool::run_erased(int64_t num_tasks, Function function, void* context) {
  if (num_tasks <= 0) return;
  if (workers_.empty() || num_tasks == 1) {
    for (int64_t i = 0; i < num_tasks; ++i) function(context, i);
    return;
  }
  const std::lock_guard<std::mutex> lock(callers_);
  function_ = function;
  context_ = context;
  num_tasks_ = num_tasks;
  chunk_ = num_tasks / static_cast<int64_t>(kFieldMask) + 1;
  const uint64_t chunks = static_cast<uint64_t>((num_tasks + chunk_ - 1) / chunk_);
  unfinished_.store(static_cast<int64_t>(chunks));
  const uint64_t generation = (ticket_.load() >> (2 * kFieldBits)) + 1;
  ticket_.store(generation << (2 * kFieldBits) | chunks << kFieldBits);
  if (parked_.load() > 0) {
    wake_.fetch_add(1);
    wake_.notify_all();
  }
  while (run_one_task()) {
  }
  for (int spins = 0; unfinished_.load() > 0; ++spins) {
    if (spins < kSpins) {
      relax();
    } else {
      std::this_thread::yield();  // a worker lost its core: let it have ours
    }
  }
}

void ThreadPool::work() {
  for (;;) {
    for (int spins = 0; spins < kSpins; ++spins) {
      if (run_one_task()) spins = 0;
      relax();
    }
    const uint32_t seen = wake_.load();
    parked_.fetch_add(1);
    if (stopping_.load()) return;
    // A job published before parked_ rose is seen here; one published after it notifies.
    if (!run_one_task()) wake_.wait(seen);
    parked_.fetch_sub(1);
    if (stopping_.load()) return;
  }
}

namespace {

struct Shared {
  std::mutex mutex;
  std::shared_ptr<ThreadPool> pool;
};

Shared& shared() {
  static Shared instance;
  return instance;
}

int32_t default_num_threads() {
  return std::max(1, static_cast<int32_t>(std::thread::hardware_concurrency()));
}

}  // namespace

std::shared_ptr<ThreadPool> shared_pool() {
  Shared& state = shared();
  const std::lock_guard<std::mutex> lock(state.mutex);
  if (!state.pool) state.pool = std::make_shared<ThreadPool>(default_num_threads());
  return state.pool;
}

void set_num_threads(int32_t num_threads) {
  if (num_threads < 0 || num_threads > 1024) {
    throw Error(ErrorKind::Config,
                "threads out of range\nexpected 0 (all processors) to 1024, got " +
                    std::to_string(num_threads));
  }
  Shared& state = shared();
  auto fresh = std::make_shared<ThreadPool>(num_threads == 0 ? default_num_threads() : num_threads);
  const std::lock_guard<std::mutex> lock(state.mutex);
  state.pool.swap(fresh);
}

}  // namespace headrace
