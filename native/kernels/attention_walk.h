// How attention is split over threads. A walk is a set of queries that go through the same pages in
// ascending order, each with one state that the pages join. Where there are fewer walks than
// threads can share, pages are attended to by themselves and joined afterwards, in the same order:
// the bits never depend on which way was taken.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/array_pool.h"
#include "base/thread_pool.h"
#include "kernels/attention_table.h"
#include "kernels/kernel_table.h"

namespace headrace {

struct PageRange {
  int32_t begin, end;
};

// Most bytes of states that pages hold before they are joined.
inline constexpr int64_t kPartBytes = int64_t{4} << 20;

// Walks must have:
//   int64_t count() const;
//   PageRange pages(int64_t walk) const;
//   int32_t num_states() const;    // of every walk
//   int32_t width() const;         // of an accumulator
//   void attend(int64_t walk, PageRange pages, float* states, int64_t page_stride) const;
//       // joins the pages to states + (page - pages.begin) * page_stride
//   void finish(int64_t walk, const float* states) const;
template <class Walks>
class WalkRunner {
 public:
  WalkRunner(ThreadPool& threads, const Walks& walks) : threads_(threads), walks_(walks) {}

  void run() {
    if (walks_.count() < int64_t{2} * threads_.num_threads() && num_pages() > 1) {
      run_split();
    } else {
      threads_.run(walks_.count(), [&](int64_t walk) {
        PoolBuffer<float> states(states_stride());
        clear(states.get(), walks_.num_states());
        walks_.attend(walk, walks_.pages(walk), states.get(), 0);
        walks_.finish(walk, states.get());
      });
    }
  }

 private:
  int64_t stride() const { return state_stride(walks_.width()); }
  int64_t states_stride() const { return walks_.num_states() * stride(); }
  int32_t num_pages() const {
    int32_t most = 0;
    for (int64_t walk = 0; walk < walks_.count(); ++walk) {
      most = std::max(most, walks_.pages(walk).end - walks_.pages(walk).begin);
    }
    return most;
  }
  void clear(float* states, int64_t num_states) const {
    for (int64_t i = 0; i < num_states; ++i) {
      states[i * stride() + walks_.width()] = 0.0f;
      states[i * stride() + walks_.width() + 1] = 0.0f;
    }
  }

  // The pages of every walk in rounds, whose parts take a bounded amount of memory.
  void run_split() {
    const int64_t walk_bytes = walks_.count() * states_stride() * int64_t{sizeof(float)};
    const int64_t affordable = std::max<int64_t>(1, kPartBytes / walk_bytes);
    const int32_t round = static_cast<int32_t>(std::min<int64_t>(num_pages(), affordable));
    PoolBuffer<float> states(walks_.count() * states_stride());
    PoolBuffer<float> parts(walks_.count() * states_stride() * round);
    clear(states.get(), walks_.count() * walks_.num_states());
    for (int32_t done = 0; done < num_pages(); done += round) {
      attend_round(done, round, parts.get());
      join_round(done, round, parts.get(), states.get());
    }
    threads_.run(walks_.count(),
                 [&](int64_t walk) { walks_.finish(walk, states.get() + walk * states_stride()); });
  }

  PageRange in_round(int64_t walk, int32_t done, int32_t round) const {
    const PageRange all = walks_.pages(walk);
    return {std::min(all.end, all.begin + done), std::min(all.end, all.begin + done + round)};
  }

  void attend_round(int32_t done, int32_t round, float* parts) {
    // About four tasks for each thread, each of neighbouring pages.
    const int64_t wanted = int64_t{4} * threads_.num_threads() / walks_.count() + 1;
    const int64_t tasks = std::min<int64_t>(round, wanted);
    threads_.run(walks_.count() * tasks, [&](int64_t i) {
      const int64_t walk = i / tasks;
      const PageRange pages = in_round(walk, done, round);
      const int64_t count = pages.end - pages.begin;
      const auto begin = static_cast<int32_t>(count * (i % tasks) / tasks);
      const auto end = static_cast<int32_t>(count * (i % tasks + 1) / tasks);
      if (begin == end) return;
      float* part = parts + (walk * round + begin) * states_stride();
      clear(part, int64_t{end - begin} * walks_.num_states());
      walks_.attend(walk, {pages.begin + begin, pages.begin + end}, part, states_stride());
    });
  }

  void join_round(int32_t done, int32_t round, const float* parts, float* states) {
    const int64_t num_states = walks_.num_states();
    threads_.run_ranges(walks_.count() * num_states, 4, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t walk = i / num_states;
        const PageRange pages = in_round(walk, done, round);
        for (int32_t page = 0; page < pages.end - pages.begin; ++page) {
          const float* part =
              parts + ((walk * round + page) * num_states + i % num_states) * stride();
          kernels().attention.join_state(part, walks_.width(), states + i * stride());
        }
      }
    });
  }

  ThreadPool& threads_;
  const Walks& walks_;
};

}  // namespace headrace
