#include "io/fault.h"

#include <array>
#include <mutex>
#include <utility>
#include <vector>

#include "base/error.h"

namespace headrace::fault {
namespace {

struct State {
  std::mutex mutex;
  std::vector<Fault> faults;
  int64_t fired = 0;
};

State& state() {
  static State instance;
  return instance;
}

constexpr std::array<std::pair<std::string_view, Kind>, 7> kNames{{
    {"eio", Kind::Eio},
    {"short", Kind::Short},
    {"end", Kind::End},
    {"delay", Kind::Delay},
    {"flip", Kind::Flip},
    {"einval", Kind::Einval},
    {"stale_slot", Kind::StaleSlot},
}};

}  // namespace

Kind parse_kind(std::string_view name) {
  for (const auto& [known, kind] : kNames) {
    if (known == name) return kind;
  }
  std::string message = "unknown fault kind: " + std::string(name) + "\nexpected one of";
  for (const auto& entry : kNames) message += " " + std::string(entry.first);
  throw Error(ErrorKind::Config, message);
}

void inject(Fault fault) {
  const std::scoped_lock lock(state().mutex);
  state().faults.push_back(std::move(fault));
  armed = true;
}

void clear() {
  const std::scoped_lock lock(state().mutex);
  state().faults.clear();
  state().fired = 0;
  armed = false;
}

int64_t num_fired() {
  const std::scoped_lock lock(state().mutex);
  return state().fired;
}

bool take(Kind kind, std::string_view path, int64_t offset, int64_t length) {
  const std::scoped_lock lock(state().mutex);
  for (Fault& fault : state().faults) {
    if (fault.kind != kind || fault.count == 0) continue;
    if (path.find(fault.path_contains) == std::string_view::npos) continue;
    if (fault.offset >= 0 && (fault.offset < offset || fault.offset >= offset + length)) continue;
    if (fault.after > 0) {
      --fault.after;
      continue;
    }
    if (fault.count > 0) --fault.count;
    ++state().fired;
    return true;
  }
  return false;
}

}  // namespace headrace::fault
