#include "store/drives.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "base/error.h"
#include "store/expert_store.h"

namespace headrace::store {
namespace {

// Reads that a bandwidth given at start counts for, and after how many what was seen weighs half:
// few, so that a drive that slows down (heat, another reader) is noticed within a layer or two.
constexpr double kFirstRecords = 4;
constexpr double kKeptRecords = 64;
// An idle drive that is passed over is thought a little better of each time, so that one slow read
// does not bar it for ever: a drive that is a tenth as fast gets one read in some 600.
constexpr double kPassedOver = 1 - 1.0 / 256;
// A drive's share of a record is worth a read of its own from this part of the record on, or from
// these bytes on.
constexpr double kLeastShareOfRecord = 1.0 / 16;
constexpr double kLeastShareBytes = 128 << 10;
// Damaged copies after which a drive's others are believed no more: they are of another model.
constexpr int64_t kMostDamaged = 8;

size_t at(int64_t value) { return static_cast<size_t>(value); }

[[noreturn]] void fail(const std::string& message) {
  throw Error(ErrorKind::Checkpoint, "expert table is inconsistent: " + message);
}

}  // namespace

Drives::Drives(const RecordTable& table, std::span<const DriveOptions> drives)
    : table_(table),
      record_bytes_(static_cast<double>(table.largest_record())),
      copies_(table.copies),
      is_damaged_(table.copies.size(), false) {
  const size_t num_records = table.layers.size() * at(table.num_experts);
  std::stable_sort(copies_.begin(), copies_.end(),
                   [](const RecordCopy& a, const RecordCopy& b) { return a.record < b.record; });
  first_copy_.assign(num_records + 1, 0);
  for (const RecordCopy& copy : copies_) {
    if (table.is_in_place()) fail("records in place have no copies");
    if (copy.record < 0 || at(copy.record) >= num_records || copy.file < 0 ||
        at(copy.file) >= table.files.size() || copy.offset < 0 ||
        copy.offset % io::kAlignment != 0) {
      fail("copy of record " + std::to_string(copy.record) + " at offset " +
           std::to_string(copy.offset) + " of file " + std::to_string(copy.file));
    }
    if (++first_copy_[at(copy.record) + 1] >= kMostPlaces) fail("a record has too many copies");
  }
  for (size_t i = 0; i < num_records; ++i) first_copy_[i + 1] += first_copy_[i];
  for (const int32_t drive : table.drive_of_file) {
    if (drive < 0 || at(drive) >= drives.size()) fail("a file lies on no drive");
  }
  for (const DriveOptions& options : drives) {
    Drive& drive = drives_.emplace_back();
    drive.readers = std::make_unique<io::ReadPool>(options.num_readers);
    drive.seen_bytes = kFirstRecords * record_bytes_;
    drive.seen_ns = drive.seen_bytes / options.bytes_per_s * 1e9;
  }
}

int32_t Drives::drive_of(int32_t record, int32_t place) const {
  const int32_t file = place == 0 ? table_.parts[at(record) * at(table_.parts_per_record)].file
                                  : copy(record, place).file;
  return at(file) < table_.drive_of_file.size() ? table_.drive_of_file[at(file)] : 0;
}

const RecordCopy& Drives::copy(int32_t record, int32_t place) const {
  return copies_[at(first_copy_[at(record)] + place - 1)];
}

// The usable places of a record, one per drive, with what is queued before it.
std::vector<Drives::Holder> Drives::holders(int32_t record, io::Priority priority,
                                            Places tried) const {
  const int32_t first = first_copy_[at(record)];
  const int32_t num_copies = first_copy_[at(record) + 1] - first;
  std::vector<Holder> found;
  for (int32_t place = 0; place <= num_copies; ++place) {
    if ((tried >> place & 1) != 0) continue;
    const Drive& drive = drives_[at(drive_of(record, place))];
    if (place > 0 && (drive.is_given_up || is_damaged_[at(first + place - 1)])) continue;
    if (std::any_of(found.begin(), found.end(),
                    [&](const Holder& other) { return other.drive == &drive; })) {
      continue;
    }
    const bool is_advice = priority == io::Priority::Advice;
    const int64_t queued = drive.demanded_bytes + (is_advice ? drive.advised_bytes : 0);
    found.push_back({place, &drive, static_cast<double>(queued), 0.0});
  }
  return found;
}

// Gives each drive what it reads from the end of its queue to the moment at which all drives end
// together. Those that would read nothing, or too little to be worth a read, are left out.
void Drives::fill_shares(std::vector<Holder>& holders, double record_bytes) const {
  const double least = std::min(kLeastShareOfRecord * record_bytes, kLeastShareBytes);
  while (true) {
    double bytes = record_bytes;
    double rate = 0.0;
    for (const Holder& holder : holders) {
      bytes += holder.queued_bytes;
      rate += bytes_per_ns(*holder.drive);
    }
    auto smallest = holders.begin();
    for (auto holder = holders.begin(); holder != holders.end(); ++holder) {
      holder->share_bytes = bytes / rate * bytes_per_ns(*holder->drive) - holder->queued_bytes;
      if (holder->share_bytes < smallest->share_bytes) smallest = holder;
    }
    if (holders.size() == 1 || smallest->share_bytes >= least) return;
    holders.erase(smallest);
  }
}

std::vector<RecordShare> Drives::divide(int32_t record, io::Priority priority, Places tried,
                                        bool whole) {
  const int64_t record_bytes = table_.layout_of(record).record_bytes;
  std::vector<Holder> used = holders(record, priority, tried);
  if (used.empty()) return {};
  if (whole) {
    const auto ends_at = [&](const Holder& holder) {
      return (holder.queued_bytes + static_cast<double>(record_bytes)) /
             bytes_per_ns(*holder.drive);
    };
    used = {*std::min_element(used.begin(), used.end(), [&](const Holder& a, const Holder& b) {
      return ends_at(a) < ends_at(b);
    })};
  }
  fill_shares(used, static_cast<double>(record_bytes));
  std::vector<RecordShare> shares;
  int64_t start = 0;
  double filled_bytes = 0.0;
  for (const Holder& holder : used) {
    filled_bytes += holder.share_bytes;
    const int64_t end = shares.size() + 1 == used.size()
                            ? record_bytes
                            : io::align_down(std::llround(filled_bytes));
    if (end > start) shares.push_back({holder.place, start, end - start});
    start = std::max(start, end);
  }
  pass_over(record, used);
  return shares;
}

// Thinks a little better of the idle drives that hold the record and are given nothing of it.
void Drives::pass_over(int32_t record, const std::vector<Holder>& used) {
  const int32_t num_copies = first_copy_[at(record) + 1] - first_copy_[at(record)];
  for (int32_t place = 0; place <= num_copies; ++place) {
    Drive& drive = drives_[at(drive_of(record, place))];
    const bool is_used = std::any_of(used.begin(), used.end(),
                                     [&](const Holder& holder) { return holder.drive == &drive; });
    if (is_used || (place > 0 && drive.is_given_up)) continue;
    if (drive.demanded_bytes == 0) drive.seen_ns *= kPassedOver;
  }
}

int64_t& Drives::queue_of(const DriveJob& job) {
  Drive& drive = drives_[at(job.drive_)];
  return job.priority_ == io::Priority::Demand ? drive.demanded_bytes : drive.advised_bytes;
}

void Drives::submit(const std::shared_ptr<DriveJob>& job, int32_t record, const RecordShare& share,
                    io::Priority priority) {
  job->drive_ = drive_of(record, share.place);
  job->bytes_ = share.length;
  job->priority_ = priority;
  queue_of(*job) += job->bytes_;
  drives_[at(job->drive_)].readers->submit(job, priority);
}

void Drives::raise(const Jobs& jobs) {
  for (const std::shared_ptr<DriveJob>& job : jobs) {
    queue_of(*job) -= job->bytes_;
    job->priority_ = io::Priority::Demand;
    queue_of(*job) += job->bytes_;
    drives_[at(job->drive_)].readers->raise(job);
  }
}

bool Drives::cancel(const Jobs& jobs) {
  for (size_t i = 0; i < jobs.size(); ++i) {
    if (drives_[at(jobs[i]->drive_)].readers->cancel(jobs[i])) continue;
    for (size_t j = 0; j < i; ++j) {
      drives_[at(jobs[j]->drive_)].readers->submit(jobs[j], jobs[j]->priority_);
    }
    return false;
  }
  for (const std::shared_ptr<DriveJob>& job : jobs) queue_of(*job) -= job->bytes_;
  return true;
}

void Drives::ended(DriveJob& job) {
  queue_of(job) -= std::exchange(job.bytes_, 0);
  if (drives_.size() > 1) learn(drives_[at(job.drive_)]);
}

void Drives::learn(Drive& drive) {
  const io::ReadPoolStats now = drive.readers->stats();
  drive.seen_bytes += static_cast<double>(now.bytes_read - drive.counted.bytes_read);
  drive.seen_ns += static_cast<double>(now.busy_ns - drive.counted.busy_ns);
  drive.counted = now;
  if (drive.seen_bytes > kKeptRecords * record_bytes_) {
    drive.seen_bytes /= 2;
    drive.seen_ns /= 2;
  }
}

void Drives::failed(int32_t record, int32_t place, bool is_damaged) {
  Drive& drive = drives_[at(drive_of(record, place))];
  if (place == 0) return;  // the model itself: tried again at the next need
  ++drive.num_failed;
  if (is_damaged) {
    is_damaged_[at(first_copy_[at(record)] + place - 1)] = true;
    drive.is_given_up |= ++drive.num_damaged >= kMostDamaged;
  } else {
    drive.is_given_up = true;
  }
}

void Drives::stop() {
  for (Drive& drive : drives_) drive.readers->stop();
}

io::ReadPoolStats Drives::stats() const {
  io::ReadPoolStats sum{};
  for (const Drive& drive : drives_) {
    const io::ReadPoolStats one = drive.readers->stats();
    sum.bytes_read += one.bytes_read;
    sum.num_reads += one.num_reads;
    sum.read_ns += one.read_ns;
    sum.busy_ns = std::max(sum.busy_ns, one.busy_ns);
    sum.in_flight_max += one.in_flight_max;
  }
  return sum;
}

std::vector<DriveStats> Drives::drive_stats() const {
  std::vector<DriveStats> all;
  for (const Drive& drive : drives_) {
    const io::ReadPoolStats one = drive.readers->stats();
    all.push_back({one.bytes_read, one.busy_ns, drive.num_failed, bytes_per_ns(drive) * 1e9,
                   drive.is_given_up});
  }
  return all;
}

}  // namespace headrace::store
