// Threads that run the tasks of one kernel call. The caller takes part; workers spin for a moment
// after each job, then park, so that a decoding loop pays no wake-up and an idle program no CPU.
// A task computes its own outputs only, so neither the number of threads nor who takes which task
// can change a bit of any result.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace headrace {

class ThreadPool {
 public:
  explicit ThreadPool(int32_t num_threads);  // including the caller; at least 1
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int32_t num_threads() const { return static_cast<int32_t>(workers_.size()) + 1; }

  // Runs task(i) for every i in [0, num_tasks) and returns when all have finished. Tasks must not
  // throw and must not call the pool. Calls from several threads take turns.
  template <class Task>
  void run(int64_t num_tasks, Task&& task) {
    using Plain = std::remove_reference_t<Task>;
    run_erased(
        num_tasks, [](void* context, int64_t i) { (*static_cast<Plain*>(context))(i); },
        const_cast<std::remove_const_t<Plain>*>(&task));
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

  using Function = void (*)(void* context, int64_t index);
  void run_erased(int64_t num_tasks, Function function, void* context);
  bool run_one_task();
  void work();

  // generation:24 | number of tasks:20 | next task:20. One word, so that a worker which slept
  // through a whole job cannot take a task of the next one with the old one's function: its
  // exchange fails.
  std::atomic<uint64_t> ticket_{0};
  std::atomic<int64_t> unfinished_{0};
  Function function_ = nullptr;  // stable while any task of the job is unfinished
  void* context_ = nullptr;
  int64_t chunk_ = 1;
  int64_t num_tasks_ = 0;

  std::atomic<uint32_t> wake_{0};
  std::atomic<int32_t> parked_{0};
  std::atomic<bool> stopping_{false};
  std::mutex callers_;
  std::vector<std::thread> workers_;
};

// The pool that the kernels use. set_num_threads waits for running calls.
std::shared_ptr<ThreadPool> shared_pool();
void set_num_threads(int32_t num_threads);

}  // namespace headrace
