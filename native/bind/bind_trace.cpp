// headrace._core: recorded traces and their replay.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>

#include <map>
#include <string>
#include <vector>

#include "bind/arrays.h"
#include "bind/bind.h"
#include "store/replay.h"
#include "store/trace.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace headrace {
namespace {

using store::ReplayCounts;
using store::ReplayResult;
using store::Trace;

std::map<std::string, std::map<std::string, int64_t>> result_map(const ReplayResult& result) {
  const auto counts = [](const ReplayCounts& from) {
    return std::map<std::string, int64_t>{{"steps", from.steps},
                                          {"tokens", from.tokens},
                                          {"requests", from.requests},
                                          {"misses", from.misses}};
  };
  return {{"prefill", counts(result.prefill)}, {"decode", counts(result.decode)}};
}

// So many that what a policy knows of pairs of experts can be counted.
void check_shape(int32_t num_rows, int32_t num_experts) {
  require_countable("a trace", {num_rows, num_experts, num_experts});
}

}  // namespace

void bind_trace(nb::module_& m) {
  nb::class_<Trace>(m, "Trace", "The routing of recorded runs, in memory.")
      .def(
          "__init__",
          [](Trace* self, int32_t num_rows, int32_t num_experts) {
            check_shape(num_rows, num_experts);
            new (self) Trace(num_rows, num_experts);
          },
          "num_rows"_a, "num_experts"_a)
      .def(
          "add",
          [](Trace& trace, const nb::bytes& block) {
            trace.add({static_cast<const std::byte*>(block.data()), block.size()});
          },
          "block"_a, "Append a block's entries; an error names the offset within the block.")
      .def_prop_ro("num_visits", [](const Trace& trace) { return trace.visits.size(); })
      .def_prop_ro("num_steps", [](const Trace& trace) { return trace.steps.size(); })
      .def(
          "visit",
          [](const Trace& trace, size_t index) {
            if (index >= trace.visits.size()) throw nb::index_error("no such visit");
            const Trace::Visit& visit = trace.visits[index];
            const auto ids = trace.ids_of(visit);
            auto* kept = new std::vector<int32_t>(ids.begin(), ids.end());
            nb::capsule owner(kept, [](void* pointer) noexcept {
              delete static_cast<std::vector<int32_t>*>(pointer);
            });
            const size_t shape[] = {static_cast<size_t>(visit.num_tokens),
                                    static_cast<size_t>(visit.num_active)};
            return nb::make_tuple(visit.row,
                                  nb::ndarray<nb::numpy, int32_t>(kept->data(), 2, shape, owner));
          },
          "index"_a, "The row of the record table and the ids [T, A] of one acquire.");

  m.def(
      "replay",
      [](const Trace& trace, const std::string& policy, int32_t num_slots, int32_t num_readers,
         int32_t read_ahead, double half_life_tokens) {
        const store::PolicyKind kind = store::parse_policy(policy);
        const nb::gil_scoped_release release;
        return result_map(
            store::replay(trace, kind, {num_slots, num_readers, read_ahead, half_life_tokens}));
      },
      "trace"_a, "policy"_a, nb::kw_only(), "num_slots"_a, "num_readers"_a, "read_ahead"_a,
      "half_life_tokens"_a, "Counts of prefill and decode under a policy.");
  m.def(
      "replay_belady",
      [](const Trace& trace, int32_t num_slots) {
        const nb::gil_scoped_release release;
        return result_map(store::replay_belady(trace, num_slots));
      },
      "trace"_a, nb::kw_only(), "num_slots"_a, "The fewest misses that knowing the future allows.");
  m.def(
      "policy_bytes",
      [](int32_t num_rows, int32_t num_experts) {
        check_shape(num_rows, num_experts);
        return store::policy_bytes(store::PolicyKind::NextUse, {num_rows, num_experts, 2, 1.0});
      },
      "num_rows"_a, "num_experts"_a, "Bytes that the most expensive policy holds at most.");
}

}  // namespace headrace
