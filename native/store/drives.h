// The drives a store reads from, each with reader threads of its own, and where each record lies:
// at its own place and as copies on other drives. A record is divided among the drives that hold it
// so that all of them are expected to end with it at once.
//
// All but copy(), stats() and stop() is called under the mutex of the store, which is the lock of
// these books; stop() never is, because jobs that it ends take that mutex.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "io/read_pool.h"

namespace headrace::store {

struct RecordTable;

// Where a packed record lies a second time.
struct RecordCopy {
  int32_t record;
  int32_t file;
  int64_t offset;
};

struct DriveOptions {
  int32_t num_readers;
  double bytes_per_s;  // as measured earlier; what reads take soon counts more
};

struct DriveStats {
  int64_t bytes_read = 0;
  int64_t busy_ns = 0;       // wall time with at least one read in flight
  int64_t num_failed = 0;    // copies of records that could not be read, or were damaged
  double bytes_per_s = 0;    // as reads are expected to go
  bool is_given_up = false;  // its copies are read no more
};

// What one drive reads of a record: a range of it, at one of its places.
struct RecordShare {
  int32_t place;
  int64_t start;  // in the record, a multiple of 4096
  int64_t length;
};

// A read as the drives see it: how much of which queue it is until it ends.
class DriveJob : public io::ReadJob {
 private:
  friend class Drives;
  int32_t drive_ = -1;  // -1: never submitted
  int64_t bytes_ = 0;   // 0 once it ended
  io::Priority priority_ = io::Priority::Demand;
};

class Drives {
 public:
  // A place of a record: 0 its own, 1 and more the copies. What was tried already is a bit per
  // place.
  using Places = uint32_t;
  using Jobs = std::vector<std::shared_ptr<DriveJob>>;
  static constexpr int32_t kMostPlaces = 32;

  // `drive_of_file` may be shorter than the files: the rest lie on drive 0. Copies must name files
  // and records that exist, no record kMostPlaces times.
  Drives(const RecordTable& table, std::span<const DriveOptions> drives);
  ~Drives() { stop(); }

  // Shares of the places not tried yet by which the record is expected to be there first: what is
  // queued before it and itself, by the bandwidths. `whole`: one share, of all. None if every place
  // was tried or given up.
  std::vector<RecordShare> divide(int32_t record, io::Priority priority, Places tried, bool whole);
  // The file and offset of a copy; `place` is 1 or more.
  const RecordCopy& copy(int32_t record, int32_t place) const;

  void submit(const std::shared_ptr<DriveJob>& job, int32_t record, const RecordShare& share,
              io::Priority priority);
  void raise(const Jobs& jobs);
  // True if none of the jobs had begun: all are forgotten. Else all go on, so never once stop() may
  // have been called.
  bool cancel(const Jobs& jobs);
  void ended(DriveJob& job);
  // A copy gave wrong bytes and is not asked again; or none, and neither is any of its drive.
  void failed(int32_t record, int32_t place, bool is_damaged);

  void stop();
  io::ReadPoolStats stats() const;  // of all; busy_ns of the busiest
  std::vector<DriveStats> drive_stats() const;

 private:
  struct Drive {
    std::unique_ptr<io::ReadPool> readers;
    int64_t demanded_bytes = 0;  // queued or in flight
    int64_t advised_bytes = 0;
    double seen_bytes =
        0;  // what the bandwidth is made of: halved now and then, so that it follows
    double seen_ns = 0;
    io::ReadPoolStats counted{};  // up to here
    int64_t num_failed = 0;
    int64_t num_damaged = 0;
    bool is_given_up = false;
  };
  // A drive that holds a record, while the record is divided.
  struct Holder {
    int32_t place;
    const Drive* drive;
    double queued_bytes;  // before the record
    double share_bytes;
  };
  std::vector<Holder> holders(int32_t record, io::Priority priority, Places tried) const;
  void fill_shares(std::vector<Holder>& holders, double record_bytes) const;
  void pass_over(int32_t record, const std::vector<Holder>& used);
  int32_t drive_of(int32_t record, int32_t place) const;
  int64_t& queue_of(const DriveJob& job);
  static double bytes_per_ns(const Drive& drive) { return drive.seen_bytes / drive.seen_ns; }
  void learn(Drive& drive);

  const RecordTable& table_;
  const double record_bytes_;  // of the largest
  std::vector<Drive> drives_;
  std::vector<int32_t> first_copy_;  // of each record, and the end
  std::vector<RecordCopy> copies_;   // by record
  std::vector<bool> is_damaged_;     // by copy
};

}  // namespace headrace::store
