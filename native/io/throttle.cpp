#include "io/throttle.h"

#include <algorithm>
#include <mutex>
#include <utility>
#include <vector>

#include "base/error.h"

namespace headrace::throttle {
namespace {

using Clock = std::chrono::steady_clock;

struct Bucket {
  Drive drive;
  Clock::time_point free_at{};  // when the reads taken so far will have been served
};

struct State {
  std::mutex mutex;
  std::vector<Bucket> buckets;  // longest prefix first
};

State& state() {
  static State instance;
  return instance;
}

Clock::duration seconds(double value) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(value));
}

}  // namespace

void set(Drive drive) {
  if (!(drive.bytes_per_s > 0) || !(drive.latency_s >= 0)) {
    throw Error(ErrorKind::Config,
                "a drive to stand for needs a bandwidth above zero and a latency of zero or more");
  }
  const std::scoped_lock lock(state().mutex);
  std::vector<Bucket>& buckets = state().buckets;
  std::erase_if(buckets,
                [&](const Bucket& old) { return old.drive.path_prefix == drive.path_prefix; });
  const auto place = std::find_if(buckets.begin(), buckets.end(), [&](const Bucket& other) {
    return other.drive.path_prefix.size() < drive.path_prefix.size();
  });
  buckets.insert(place, Bucket{std::move(drive)});
  armed = true;
}

void clear() {
  const std::scoped_lock lock(state().mutex);
  state().buckets.clear();
  armed = false;
}

std::optional<Clock::time_point> take(std::string_view path, int64_t length) {
  const std::scoped_lock lock(state().mutex);
  for (Bucket& bucket : state().buckets) {
    if (!path.starts_with(bucket.drive.path_prefix)) continue;
    const Clock::time_point start = std::max(Clock::now(), bucket.free_at);
    bucket.free_at = start + seconds(static_cast<double>(length) / bucket.drive.bytes_per_s);
    return bucket.free_at + seconds(bucket.drive.latency_s);
  }
  return std::nullopt;
}

}  // namespace headrace::throttle
