// Threads that run one kernel call together. The caller takes part; workers spin for a moment after
// each job, then park, so that a decoding loop pays no wake-up and an idle program no CPU. An item
// of work writes its own outputs only, so neither the number of threads nor who takes which item
// can change a bit of any result.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace headrace {

// Returns once `word` is no longer `seen`. Spins first, because what a thread waits for inside a
// job is microseconds away; then sleeps, so that a thread which lost its core can have this one: a
// scheduler moves it to an idle core at once, but leaves it where it is while we spin or yield.
// Whoever changes the word calls notify_all on it.
void wait_for_change(const std::atomic<uint32_t>& word, uint32_t seen);

// The first exception of work that several threads share: kept until all of them are done, then
// thrown to who waits for them. Later ones are dropped. `guard` may be concurrent, `rethrow` comes
// after all work.
class FirstException {
 public:
  template <class Work>
  void guard(Work&& work) noexcept {
    try {
      work();
    } catch (...) {
      if (!is_kept_.exchange(true)) kept_ = std::current_exception();
    }
  }
  void rethrow() const {
    if (is_kept_.load()) std::rethrow_exception(kept_);
  }

 private:
  std::atomic<bool> is_kept_{false};
  std::exception_ptr kept_;
};

// Items [0, count) dealt to threads. Each takes its own part from the front, a quarter of what is
// left of it at a time, so that weights stored one after another are read as one stream; a thread
// without work takes half of what the richest other has left. Few, shrinking takes: every one is a
// locked instruction, which waits for the loads under way (one per 32 KiB of weights cost 5 % of
// the read bandwidth, docs/experiments.md). All calls but `deal` may be concurrent.
class Shares {
 public:
  static constexpr int64_t kMaxItems = INT32_MAX;

  struct alignas(64) Part {
    std::atomic<uint64_t> range{0};  // end:32 | begin:32
  };

  Shares() = default;
  // parts: one per thread, which outlive this.
  Shares(Part* parts, int32_t num_threads) : parts_(parts), num_threads_(num_threads) {}

  void deal(int64_t count);                     // evenly
  void deal_to(int32_t thread, int64_t count);  // all to one: the others help when they are idle
  // The next items of the thread, none if all were taken.
  struct Items {
    int64_t begin, end;
  };
  Items take(int32_t thread);

 private:
  Items steal(int32_t thread);

  Part* parts_ = nullptr;
  int32_t num_threads_ = 0;
};

class ThreadPool {
 public:
  explicit ThreadPool(int32_t num_threads);  // including the caller; at least 1
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int32_t num_threads() const { return static_cast<int32_t>(workers_.size()) + 1; }

  // One parallel region: runs body(0) on the caller and body(thread), 1 <= thread < num_threads, on
  // every worker that comes before body(0) returns; returns when all of them have. Which workers
  // come is not known: a body may wait for work that another took, never for another to come. What
  // a body throws reaches the caller once all have returned; so a body that others wait for does
  // not leave its work that way. Bodies must not call the pool. Calls from several threads take
  // turns.
  template <class Body>
  void together(Body&& body) {
    const std::lock_guard<std::mutex> lock(callers_);
    together_locked(body);
  }

  // Runs task(i) for every i in [0, num_tasks) and returns when all have finished; if any threw,
  // throws the first of their exceptions then. The others run all the same.
  template <class Task>
  void run(int64_t num_tasks, Task&& task) {
    FirstException first;
    run_spans(num_tasks, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) first.guard([&] { task(i); });
    });
    first.rethrow();
  }

  // The same for spans of tasks, each as long as what a thread takes at once: task(begin, end),
  // begin < end, so that neighbours cost one call. A span that throws gives up its own rest only.
  template <class Task>
  void run_spans(int64_t num_tasks, Task&& task) {
    if (workers_.empty() || num_tasks <= 1) {
      if (num_tasks > 0) task(int64_t{0}, num_tasks);
      return;
    }
    FirstException first;
    const std::lock_guard<std::mutex> lock(callers_);
    const int64_t chunk = num_tasks / Shares::kMaxItems + 1;
    shares_.deal((num_tasks + chunk - 1) / chunk);
    together_locked([&](int32_t thread) {
      for (auto items = shares_.take(thread); items.begin < items.end;
           items = shares_.take(thread)) {
        const int64_t last = items.end * chunk < num_tasks ? items.end * chunk : num_tasks;
        first.guard([&] { task(items.begin * chunk, last); });
      }
    });
    first.rethrow();
  }

  // Splits [0, count) into ranges of at least `grain` and runs task(begin, end) on each.
  template <class Task>
  void run_ranges(int64_t count, int64_t grain, Task&& task) {
    if (count <= 0) return;
    const int64_t most = (count + grain - 1) / grain;
    const int64_t wanted = num_threads() == 1 ? 1 : int64_t{num_threads()} * kRangesPerThread;
    const int64_t ranges = most < wanted ? most : wanted;
    run(ranges, [&](int64_t i) { task(count * i / ranges, count * (i + 1) / ranges); });
  }

 private:
  // Enough that a thread which lost its core for a moment does not hold up the rest for long.
  static constexpr int64_t kRangesPerThread = 4;

  using Function = void (*)(void* context, int32_t thread);

  template <class Body>
  void together_locked(Body&& body) {
    FirstException first;
    auto guarded = [&](int32_t thread) { first.guard([&] { body(thread); }); };
    using Guarded = decltype(guarded);
    open([](void* context, int32_t thread) { (*static_cast<Guarded*>(context))(thread); },
         &guarded);
    guarded(0);
    close();
    first.rethrow();
  }
  void open(Function function, void* context);
  void close();
  void stop();
  void work();
  bool join(uint32_t& last);

  // generation:21 | workers that joined:10 | is open:1. A worker joins by exchanging the word it
  // saw, and reads the job after that: so it is counted before it touches anything of the job.
  std::atomic<uint32_t> job_{0};
  std::atomic<uint32_t> left_{0};  // workers that joined and have finished
  Function function_ = nullptr;
  void* context_ = nullptr;

  std::atomic<bool> stopping_{false};
  std::mutex callers_;
  std::unique_ptr<Shares::Part[]> parts_;
  Shares shares_;  // of `run`, for the caller that holds the mutex
  std::vector<std::thread> workers_;
};

// The pool that the kernels use. set_num_threads waits for running calls.
std::shared_ptr<ThreadPool> shared_pool();
void set_num_threads(int32_t num_threads);

}  // namespace headrace
