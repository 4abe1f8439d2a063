// The one owner of every expert byte: a pool of slots over all layers, filled from the drive as the
// router asks. It decides what to read, where to put it and what to give up; it computes nothing.
//
// One mutex guards the books; reader threads take it only to report a finished record. Lock order:
// the store's mutex, then the read pool's. A slot belongs to the store, never to a lease: a lease
// that ends early unpins its slots, and a read still in flight completes into the cache.
//
// A trace is written in acquire(), where every routed id passes, and replayed through Policy alone.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/array_pool.h"
#include "base/record_feed.h"
#include "io/file.h"
#include "io/load.h"
#include "io/memory.h"
#include "io/read_pool.h"
#include "store/drives.h"
#include "store/lookahead.h"
#include "store/policy.h"
#include "store/trace.h"

namespace headrace::store {

// How one stored tensor of a matrix becomes a part of the packed one. Given from outside: the store
// knows no arithmetic. Used by many reader threads at once.
class RowPacker {
 public:
  // What is wrong with a value: the message's first line, what was expected and came, and a hint.
  struct Complaint {
    const char* title;
    const char* expected;
    const char* hint;
  };
  virtual ~RowPacker() = default;
  // Lays `count` rows of the tensor from row `first` on, one after the other at `source`, out in
  // the packed matrix at `dest`. `factor` belongs to the record and matrix. Returns the row-major
  // index within these rows of the first value that cannot be taken, or -1.
  virtual int64_t pack(const std::byte* source, float factor, const ExpertMatrix& matrix,
                       int32_t first, int32_t count, std::byte* dest) const = 0;
  virtual Complaint complaint() const = 0;
  // Which of the tensor's matrices holds the value at a row-major index of the whole tensor:
  // `matrix`, the one it is named for, unless two share it.
  virtual int32_t matrix_at(int32_t matrix, int64_t /*index*/) const { return matrix; }
};

// A tensor of one of a record's matrices: rows that the reads are cut between.
struct RowSource {
  int32_t matrix;  // 0 gate, 1 up, 2 down; the first of two that share the tensor
  int32_t rows;
  int64_t row_bytes;   // in the file
  int32_t row_values;  // for the place of a bad one
  int32_t granule;     // rows that are packed together
  int32_t alignment;   // bytes, of the values that `packer` reads
  std::shared_ptr<const RowPacker> packer;
};

// Completes a matrix once all of its tensors are packed.
using FinishMatrix = void (*)(const ExpertMatrix& matrix, std::byte* packed);

struct RecordPart {
  int32_t file;
  int64_t offset;
  int64_t length;
};

// Where every record is. A packed record is one part; a record in place has one or more tensors for
// each of its matrices (gate, up, down), row after row, anywhere in any files, packed while they
// are read.
struct RecordTable {
  std::vector<std::string> files;
  std::vector<int32_t> layers;  // the model's layer number of each row of the table
  int32_t num_experts = 0;
  std::vector<ExpertLayout> layouts;   // of each row's records; slots are as large as the largest
  int32_t parts_per_record = 1;        // 1 packed, 3 and more in place
  std::vector<RecordPart> parts;       // [layers, experts, parts_per_record]
  std::vector<uint64_t> checksums;     // [layers, experts] of packed records, or empty
  std::vector<RowSource> sources;      // [layers, parts_per_record] when in place, else empty
  std::vector<float> factors;          // [layers, experts, 3] when in place; empty: all are one
  FinishMatrix finish = nullptr;       // of records in place that need it
  std::vector<int32_t> drive_of_file;  // may be shorter than files: the rest lie on drive 0
  std::vector<RecordCopy> copies;      // of packed records, in files that `files` names, too

  bool is_in_place() const { return !sources.empty(); }
  const ExpertLayout& layout_of(int32_t record) const {
    return layouts[static_cast<size_t>(record / num_experts)];
  }
  int64_t largest_record() const;  // bytes
};

struct Options {
  int32_t num_slots = 2;
  int32_t num_readers = 4;
  int64_t block_bytes = io::kDefaultBlockBytes;
  int32_t read_ahead = 16;  // misses of one lease that may be loading or ready and not yet consumed
  bool direct = true;
  double half_life_tokens = 32.0;
  bool lock = false;  // slots are never swapped out
  PolicyKind policy = PolicyKind::Frequency;
  std::vector<DriveOptions> drives;  // empty: one, read by num_readers, which else is their sum
  bool lookahead = true;  // read early what a later layer will probably ask for, while that pays
};

struct Stats {
  // One request is one distinct expert of one acquire; hits + misses == requests.
  int64_t requests = 0;
  int64_t hits = 0;  // in a slot or already on the way
  int64_t misses = 0;
  int64_t joined = 0;         // hits whose read had not finished
  int64_t prefetch_hits = 0;  // hits whose bytes were read by advice, counted at the first use
  int64_t evictions = 0;
  int64_t bytes_read = 0;      // for misses; of packed records their sizes
  int64_t prefetch_bytes = 0;  // for prefetch and warm
  int64_t reread_bytes = 0;    // part of the two above: records that had been read before
  int64_t failed_reads = 0;    // of records, advised ones too; their bytes count nowhere
  int64_t failed_copies = 0;   // records read elsewhere because a place had no good copy
  int64_t cancelled = 0;       // requests withdrawn because their lease ended before the read began
  int64_t stolen = 0;    // records a lease lost before it used them, so that another could go on
  int64_t stall_ns = 0;  // time next_ready waited
  int64_t read_ns = 0;   // summed over reads
  int64_t drive_busy_ns = 0;  // wall time with at least one read in flight
  int32_t reads_in_flight_max = 0;
  LookaheadStats lookahead;
  bool is_direct = true;  // false once any file fell back to buffered reads
};

class ExpertStore;

// A claim on the records of one layer for one step. Used by one thread; a store may have many.
class Lease final : public RecordFeed {
 public:
  ~Lease() override { release(); }
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;

  // Leases come and go with every layer of every step, so their memory is the pool's.
  static void* operator new(size_t size) {
    return ArrayPool::shared().take(static_cast<int64_t>(size));
  }
  static void operator delete(void* lease) { ArrayPool::shared().give(lease); }

  std::span<const int32_t> expert_ids() const override { return {ids_.get(), size()}; }
  std::span<const int32_t> num_tokens() const {  // routed to each expert
    return {num_tokens_.get(), size()};
  }
  const ExpertLayout& layout() const override;
  int32_t next_ready(std::span<int32_t> out) override;
  const std::byte* data(int32_t index) const override;
  void done(int32_t index) override;

  // Gives every slot back, whatever its state; never waits. Reads that have not begun are
  // withdrawn.
  void release();

 private:
  friend class ExpertStore;
  enum class State : uint8_t {
    Waiting,
    Held,
    Out,
    Done
  };  // no slot; pinned; handed out; given back
  struct Item {
    int32_t record;
    int32_t slot = -1;
    State state = State::Waiting;
    bool is_miss = false;  // this lease ordered the read
  };
  // Of the experts with tokens, counted in num_tokens [E]. Until it is registered it counts as
  // released: if that fails there is nothing to give back.
  Lease(std::shared_ptr<ExpertStore> store, int32_t first_record,
        std::span<const int32_t> num_tokens);

  size_t size() const { return static_cast<size_t>(items_.count()); }
  std::span<Item> items() const { return {items_.get(), size()}; }

  std::shared_ptr<ExpertStore> store_;
  const ExpertLayout* layout_;
  PoolBuffer<int32_t> ids_;
  PoolBuffer<int32_t> num_tokens_;
  PoolBuffer<Item> items_;  // as all below: under the store's mutex
  int32_t num_ahead_ = 0;   // misses loading, or ready and not yet done
  int32_t first_waiting_ = 0;
  std::string error_;        // a record cannot be had: what next_ready throws from then on
  bool is_waiting_ = false;  // its thread is inside next_ready
  bool is_released_ = true;
};

class ExpertStore final : public RecordSource, public std::enable_shared_from_this<ExpertStore> {
 public:
  // Opens the files; throws Error(Checkpoint) for a missing one, Error(Config) for senseless
  // options.
  static std::shared_ptr<ExpertStore> open(RecordTable table, const Options& options);
  ~ExpertStore() override;
  ExpertStore(const ExpertStore&) = delete;
  ExpertStore& operator=(const ExpertStore&) = delete;

  // ids: experts of `num_tokens` tokens, in any order, repeats welcome. Queues the misses and
  // returns.
  std::unique_ptr<Lease> acquire(int32_t layer, std::span<const int32_t> ids, int32_t num_tokens);
  std::unique_ptr<RecordFeed> feed(int32_t layer, std::span<const int32_t> ids,
                                   int32_t num_tokens) override {
    return acquire(layer, ids, num_tokens);
  }
  const ExpertLayout& layout(int32_t layer) const override;
  bool wants_advice() const override;
  // Advice for a layer: reads what is missing of it at low priority, into a few slots set aside: of
  // those that hold records in use only a few are ever given up for it. What has not begun when the
  // layer is acquired, and is not wanted, is withdrawn.
  void look_ahead(int32_t layer, std::span<const int32_t> ids, int32_t num_tokens) override;
  // Advice: read at low priority what is missing, unless it would push out something hotter. Stale
  // advice for a layer is dropped when that layer is acquired.
  void prefetch(int32_t layer, std::span<const int32_t> ids);
  // Fills free slots, most wanted first, at low priority; never evicts. (layer, expert) pairs.
  void warm(std::span<const std::pair<int32_t, int32_t>> records);

  // Routed tokens per record, [layers, experts]: decayed, as the policy sees them; and plainly
  // counted.
  std::vector<double> frequencies() const;
  void set_frequencies(std::span<const double> frequencies);
  std::vector<int64_t> routed_counts() const;
  // By expert of a layer: 1 if it is in a slot or on the way into one.
  std::vector<uint8_t> held(int32_t layer) const;
  int64_t num_routed_tokens() const;

  // Writes every routed id into a buffer from now on; take_trace empties it. A step is announced by
  // who knows whose rows it computes.
  void start_trace();
  void trace_step(std::span<const TracePart> parts);
  std::vector<std::byte> take_trace();

  // Changes the number of slots, at most the number opened with. Shrinking evicts unpinned records
  // and returns their memory to the system. Returns the number reached: pinned slots stay.
  int32_t resize(int32_t num_slots);
  int32_t num_slots() const;
  // Of these, those that held no record since the system gave their memory: it gives it at the
  // first.
  int32_t num_untouched_slots() const;
  Stats stats() const;
  std::vector<DriveStats> drive_stats() const;
  std::string copy_error() const;  // why the first copy failed; empty if none did
  const RecordTable& table() const { return table_; }

  // Withdraws what is queued, waits for the reads in flight, ends the readers. Leases still alive
  // keep the bytes they were handed; their next_ready throws.
  void close();
  // What is wrong with the books; empty if nothing. For tests.
  std::string debug_check() const;

 private:
  friend class Lease;
  class Load;
  enum class SlotState : uint8_t { Free, Loading, Ready, Retired };
  struct Slot {
    SlotState state = SlotState::Free;
    int32_t record = -1;
    int32_t pins = 0;            // items of leases; a pinned slot is never a victim
    bool is_advised = false;     // read by advice and not used yet
    bool is_staged = false;      // read by lookahead and not used yet: no candidate of the policy
    std::shared_ptr<Load> load;  // while Loading
  };

  ExpertStore(RecordTable table, const Options& options);

  static size_t at(int64_t value) { return static_cast<size_t>(value); }
  int32_t layer_row(int32_t layer) const;
  int32_t record_of(int32_t row, int32_t expert) const;
  std::byte* slot_data(int32_t slot) const;
  std::span<const RecordPart> parts(int32_t record) const;

  int32_t next_ready(Lease& lease, std::span<int32_t> out);
  void done(Lease& lease, int32_t index);
  void release(Lease& lease);
  void fail_leases_locked(int32_t slot, const std::string& error);
  bool share_ended(Load& load, DriveJob& share);
  void loaded(Load& load, std::string error, int64_t bytes_read);
  bool read_elsewhere_locked(const Load& load);
  bool read_again_locked(const Load& load);
  void read_on_locked(const Load& load, std::span<const RecordShare> shares, const Load* before);
  io::Priority urgency_locked(const Load& load) const;

  void route_locked(const Visit& visit);
  bool hold_locked(Lease::Item& item);
  bool issue_locked(Lease& lease);
  bool steal_locked();
  void lose_locked(Lease& lease, Lease::Item& item);
  bool has_read_in_flight_locked(const Lease& lease) const;
  int32_t take_slot_locked(int32_t colder_than);
  int32_t pop_free_locked();
  void evict_locked();
  int32_t most_staged_locked(int32_t num_tokens) const;
  int32_t staging_slot_locked(int32_t record, int32_t most, bool spares_hotter);
  void unstage_locked(int32_t slot);
  bool give_up_staged_locked(int32_t slot);
  bool give_up_other_staged_locked(int32_t row);
  DriveView view_drive_locked() const;
  void judge_lookahead_locked(const Visit& visit, int32_t num_used);
  void measure_drive_locked();
  bool is_candidate(const Slot& slot) const {
    return slot.state == SlotState::Ready && slot.pins == 0 && !slot.is_staged;
  }
  void cancel_advice_locked();
  void pump_advice_locked();
  int32_t slot_for_advice_locked(int32_t record, bool may_evict);
  void start_load_locked(int32_t record, int32_t slot, io::Priority priority);
  void submit_locked(const std::shared_ptr<Load>& load, io::Priority priority);
  bool withdraw_locked(const Slot& slot);
  void blame_locked(const Load& load, bool is_had_elsewhere);
  void count_bytes_locked(int32_t record, io::Priority priority, int64_t bytes);
  void pin_locked(int32_t slot);
  void unpin_locked(int32_t slot);
  void free_slot_locked(int32_t slot);
  void free_memory_if_unused_locked();

  const RecordTable table_;
  const Options options_;
  std::vector<std::unique_ptr<io::File>> files_;
  const int64_t slot_bytes_;
  io::PageBuffer memory_;
  std::vector<int32_t> row_of_layer_;  // -1: the layer has no experts

  std::mutex close_mutex_;  // before mutex_
  mutable std::mutex mutex_;
  std::condition_variable changed_;  // a record finished, or a slot came free
  std::vector<Slot> slots_;
  std::vector<int32_t> slot_of_;  // by record, -1 if it has none
  std::vector<int32_t> free_;     // slots, last one taken first
  std::vector<int32_t> retired_;
  std::vector<bool> is_touched_;  // by slot
  std::vector<int32_t> advised_;  // slots being loaded by advice
  std::vector<int32_t> staged_;   // slots filled by lookahead and not used yet, oldest first
  Lookahead lookahead_;
  std::chrono::steady_clock::time_point named_at_{};      // when lookahead named experts last
  int64_t named_busy_ns_ = 0;                             // of the readers, at that time
  std::chrono::steady_clock::time_point wanted_until_{};  // when the last awaited record came
  io::ReadPoolStats counted_{};                           // by the readers, up to here
  ReadPace pace_;
  std::deque<int32_t> prefetch_;  // advised records not started yet
  std::deque<int32_t> warm_;
  std::vector<Lease*> leases_;
  std::unique_ptr<Policy> policy_;
  std::unique_ptr<TraceBuffer> trace_;  // none unless somebody wants a trace
  std::vector<int64_t> routed_counts_;
  std::vector<bool> was_read_;
  std::vector<bool> is_bad_;  // by record: its last read failed, so advice leaves it to a demand
  std::vector<int32_t> scratch_;  // tokens per expert in acquire
  int64_t num_routed_tokens_ = 0;
  bool is_closed_ = false;    // nothing is ordered any more
  bool has_stopped_ = false;  // and nothing is in flight
  Stats stats_;

  std::string copy_error_;

  std::unique_ptr<Drives> readers_;  // last: its threads use all of the above
};

}  // namespace headrace::store
