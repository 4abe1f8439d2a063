// The thread pool: every task once, jobs in a row and from several callers, workers that parked.
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "base/array_pool.h"
#include "base/error.h"
#include "base/thread_pool.h"
#include "kernels_support.h"

namespace headrace::test {
namespace {

void test_every_task_runs_once(int32_t threads) {
  ThreadPool pool(threads);
  check(pool.num_threads() == threads);
  for (int64_t count : {0, 1, 2, 7, 1000, 1'100'000}) {
    std::vector<std::atomic<int8_t>> runs(static_cast<size_t>(count));
    pool.run(count, [&](int64_t i) { runs[static_cast<size_t>(i)].fetch_add(1); });
    for (const std::atomic<int8_t>& n : runs) check(n.load() == 1);
  }
}

void test_ranges_cover(int32_t threads) {
  ThreadPool pool(threads);
  for (int64_t count : {0, 1, 5, 64, 1001}) {
    for (int64_t grain : {1, 3, 2000}) {
      std::vector<std::atomic<int8_t>> runs(static_cast<size_t>(count));
      pool.run_ranges(count, grain, [&](int64_t begin, int64_t end) {
        check(begin < end);
        for (int64_t i = begin; i < end; ++i) runs[static_cast<size_t>(i)].fetch_add(1);
      });
      for (const std::atomic<int8_t>& n : runs) check(n.load() == 1);
    }
  }
}

void test_spans_cover(int32_t threads) {
  ThreadPool pool(threads);
  for (int64_t count : {0, 1, 2, 7, 1000, 100'000}) {
    std::vector<std::atomic<int8_t>> runs(static_cast<size_t>(count));
    std::atomic<int64_t> spans{0};
    pool.run_spans(count, [&](int64_t begin, int64_t end) {
      check(begin < end);
      spans.fetch_add(1);
      for (int64_t i = begin; i < end; ++i) runs[static_cast<size_t>(i)].fetch_add(1);
    });
    for (const std::atomic<int8_t>& n : runs) check(n.load() == 1);
    if (count >= 1000) check(spans.load() < count / 2);
  }
}

// Every item is taken once, whoever owns how many; a thread without a part lives on the others'.
void test_shares(int32_t threads) {
  std::vector<Shares::Part> parts(static_cast<size_t>(threads));
  Shares shares(parts.data(), threads);
  ThreadPool pool(threads);
  for (int64_t count : {0, 1, 2, 5, 1000, 100'000}) {
    for (int32_t owner = -1; owner < threads; ++owner) {
      if (owner < 0) {
        shares.deal(count);
      } else {
        shares.deal_to(owner, count);
      }
      std::vector<std::atomic<int8_t>> taken(static_cast<size_t>(count));
      pool.together([&](int32_t thread) {
        for (auto items = shares.take(thread); items.begin < items.end;
             items = shares.take(thread)) {
          for (int64_t i = items.begin; i < items.end; ++i) {
            taken[static_cast<size_t>(i)].fetch_add(1);
          }
        }
      });
      for (const std::atomic<int8_t>& n : taken) check(n.load() == 1);
    }
  }
}

// A thread goes through its own part in order, then takes the back half of another's.
void test_order_of_shares() {
  std::vector<Shares::Part> parts(2);
  Shares shares(parts.data(), 2);
  shares.deal(16);
  const auto takes = [&](int32_t thread, int64_t begin, int64_t end) {
    const Shares::Items items = shares.take(thread);
    return items.begin == begin && items.end == end;
  };
  check(takes(1, 8, 10) && takes(1, 10, 12) && takes(1, 12, 13) && takes(1, 13, 14));
  check(takes(1, 14, 15) && takes(1, 15, 16));
  check(takes(1, 4, 5) && takes(1, 5, 6));  // of 4..7
  check(takes(0, 0, 1) && takes(0, 1, 2) && takes(0, 2, 3) && takes(0, 3, 4));
  check(takes(0, 7, 8) && takes(1, 6, 7));
  check(takes(0, 0, 0) && takes(1, 0, 0));
}

// A region ends when everybody who came has left; each thread comes once and has its own number.
void test_regions(int32_t threads) {
  ThreadPool pool(threads);
  for (int round = 0; round < 3000; ++round) {
    std::vector<std::atomic<int8_t>> came(static_cast<size_t>(threads));
    std::atomic<int32_t> inside{0};
    pool.together([&](int32_t thread) {
      inside.fetch_add(1);
      came[static_cast<size_t>(thread)].fetch_add(1);
      inside.fetch_sub(1);
    });
    check(inside.load() == 0);
    check(came[0].load() == 1);
    for (const std::atomic<int8_t>& n : came) check(n.load() <= 1);
  }
}

// What one thread waits for and another brings, late enough for the waiter to fall asleep.
void test_wait_for_change() {
  std::atomic<uint32_t> word{7};
  std::thread other([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    word.store(8);
    word.notify_all();
  });
  wait_for_change(word, 7);
  check(word.load() == 8);
  wait_for_change(word, 7);  // already past
  other.join();
}

// Short jobs back to back, so that workers come late to many of them.
void test_many_short_jobs(int32_t threads) {
  ThreadPool pool(threads);
  int64_t total = 0;
  for (int64_t job = 0; job < 20000; ++job) {
    int64_t values[4] = {};
    pool.run(4, [&](int64_t i) { values[i] = job + i; });
    for (int64_t value : values) total += value;
  }
  check(total == 4 * (20000LL * 19999 / 2) + 20000 * 6);
}

void test_several_callers() {
  ThreadPool pool(3);
  std::vector<std::thread> callers;
  std::atomic<int64_t> sum{0};
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&] {
      for (int job = 0; job < 500; ++job) {
        pool.run(8, [&](int64_t i) { sum.fetch_add(i); });
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  check(sum.load() == 4 * 500 * 28);
}

void test_parked_workers_wake() {
  ThreadPool pool(3);
  for (int round = 0; round < 5; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    std::atomic<int> inside{0};
    // Three tasks that wait for each other: only three awake threads can finish them.
    pool.run(3, [&](int64_t) {
      inside.fetch_add(1);
      while (inside.load() < 3) std::this_thread::yield();
    });
  }
}

std::string what_is_thrown(const std::function<void()>& work) {
  try {
    work();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

// An item that throws ends neither the process nor the others' work; its caller learns of it, and
// the pool serves the next call.
void test_items_that_throw(int32_t threads) {
  ThreadPool pool(threads);
  for (const int64_t count : {1, 2, 1000}) {
    for (const int64_t bad : {int64_t{0}, count - 1}) {
      std::vector<std::atomic<int8_t>> runs(static_cast<size_t>(count));
      const auto run = [&] {
        pool.run(count, [&](int64_t i) {
          runs[static_cast<size_t>(i)].fetch_add(1);
          if (i == bad) throw std::runtime_error("item " + std::to_string(i));
        });
      };
      check(what_is_thrown(run) == "item " + std::to_string(bad));
      for (const std::atomic<int8_t>& n : runs) check(n.load() == 1);
    }
    const auto all = [&] { pool.run(count, [](int64_t) { throw std::runtime_error("any"); }); };
    check(what_is_thrown(all) == "any");
    const auto ranges = [&] {
      pool.run_ranges(count, 1, [](int64_t, int64_t) { throw std::runtime_error("range"); });
    };
    check(what_is_thrown(ranges) == "range");
    const auto spans = [&] {
      pool.run_spans(count, [](int64_t, int64_t) { throw std::runtime_error("span"); });
    };
    check(what_is_thrown(spans) == "span");
  }
  std::atomic<int64_t> sum{0};
  pool.run(100, [&](int64_t i) { sum.fetch_add(i); });
  check(sum.load() == 4950);
}

void test_regions_that_throw(int32_t threads) {
  ThreadPool pool(threads);
  for (int32_t round = 0; round < 200; ++round) {
    std::atomic<int32_t> inside{0};
    const auto on_all = [&] {
      pool.together([&](int32_t) {
        inside.fetch_add(1);
        std::this_thread::yield();
        inside.fetch_sub(1);
        throw std::runtime_error("region");
      });
    };
    check(what_is_thrown(on_all) == "region");
    check(inside.load() == 0);
    // The caller's own body returns; a worker's, if one comes, throws.
    std::atomic<bool> has_come{false};
    const auto on_others = [&] {
      pool.together([&](int32_t thread) {
        if (thread == 0) return std::this_thread::yield();
        has_come.store(true);
        throw std::runtime_error("worker");
      });
    };
    const std::string thrown = what_is_thrown(on_others);
    check(thrown == (has_come.load() ? "worker" : ""));
  }
}

void test_number_of_threads() {
  set_num_threads(2);
  const auto before = shared_pool();
  check(before->num_threads() == 2);
  set_num_threads(1);
  check(shared_pool()->num_threads() == 1);
  before->run(10, [](int64_t) {});  // still whole for who holds it
  set_num_threads(0);
  check(shared_pool()->num_threads() >= 1);
  check(throws(ErrorKind::Config, [] { set_num_threads(-1); }));
}

void test_array_pool_reuses() {
  ArrayPool pool;
  void* first = pool.take(1000);
  pool.give(first);
  check(pool.take(1010) == first);  // the same size class
  pool.give(first);
  check(pool.take(600) == first);  // less than twice what is asked for
  pool.give(first);
  const int64_t held = pool.held_bytes();
  check(held >= 1010 && held < 1300);
  void* small = pool.take(300);
  check(small != first);
  pool.give(small);
  for (int64_t size : {1, 255, 256, 257, 4096, 5000, 1 << 20, (1 << 20) + 1}) {
    void* buffer = pool.take(size);
    std::memset(buffer, 1, static_cast<size_t>(size));
    check(reinterpret_cast<uintptr_t>(buffer) % 64 == 0);
    pool.give(buffer);
  }
  pool.trim();
  check(pool.held_bytes() == 0);
}

}  // namespace
}  // namespace headrace::test

int main() {
  using namespace headrace::test;
  for (int32_t threads : {1, 2, 4}) {
    test_every_task_runs_once(threads);
    test_ranges_cover(threads);
    test_spans_cover(threads);
    test_many_short_jobs(threads);
    test_shares(threads);
    test_regions(threads);
    test_items_that_throw(threads);
    test_regions_that_throw(threads);
  }
  test_order_of_shares();
  test_wait_for_change();
  test_several_callers();
  test_parked_workers_wake();
  test_number_of_threads();
  test_array_pool_reuses();
  return 0;
}
