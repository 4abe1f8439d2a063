#include "store/expert_store.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/error.h"
#include "base/process.h"
#include "store/load.h"

namespace headrace::store {
namespace {

constexpr int32_t kMinSlots = 2;
constexpr int64_t kMostBlockBytes = int64_t{1} << 40;
constexpr double kUsualBytesPerS = 1e9;  // of a drive alone: nothing depends on it
constexpr int32_t kNoRow = -1;

// Of the slots that lookahead may fill: one in so many, and at most so many. One of few tokens
// leaves the drive idle for a few records.
constexpr int32_t kSlotsPerStaged = 8;
constexpr int32_t kMostStaged = 8;
constexpr int32_t kSlotsPerStagedOfMany = 3;  // a step of many tokens: the whole layer may come

int64_t elapsed_ns(std::chrono::steady_clock::time_point since) {
  const auto duration = std::chrono::steady_clock::now() - since;
  return std::chrono::duration_cast<std::chrono::nanoseconds>(duration).count();
}

void check_options(const Options& options) {
  const auto require = [](bool is_good, const char* what, int64_t got) {
    if (!is_good)
      throw Error(ErrorKind::Config, std::string(what) + ", got " + std::to_string(got));
  };
  require(options.num_slots >= kMinSlots, "num_slots must be at least 2", options.num_slots);
  require(options.num_readers >= 1 && options.num_readers <= io::kMostReaders,
          "num_readers must be 1 to 256", options.num_readers);
  require(options.block_bytes >= io::kAlignment && options.block_bytes <= kMostBlockBytes,
          "block_bytes must be 4096 to 1 TiB", options.block_bytes);
  require(options.read_ahead >= 1, "read_ahead must be at least 1", options.read_ahead);
  for (const DriveOptions& drive : options.drives) {
    require(drive.num_readers >= 1 && drive.num_readers <= io::kMostReaders,
            "readers of a drive must be 1 to 256", drive.num_readers);
    require(drive.bytes_per_s > 0, "bandwidth of a drive must be positive",
            static_cast<int64_t>(drive.bytes_per_s));
  }
  require(options.half_life_tokens > 0, "half_life_tokens must be positive",
          static_cast<int64_t>(options.half_life_tokens));
}

}  // namespace

// Opening and closing

std::shared_ptr<ExpertStore> ExpertStore::open(RecordTable table, const Options& options) {
  check_options(options);
  check_table(table);
  return owned_by_this_process(new ExpertStore(std::move(table), options));
}

ExpertStore::ExpertStore(RecordTable table, const Options& options)
    : table_(std::move(table)),
      options_(options),
      slot_bytes_(table_.largest_record()),
      memory_(slot_bytes_ * options.num_slots),
      slots_(at(options.num_slots)),
      lookahead_(table_.num_experts),
      policy_(Policy::make(options.policy,
                           {static_cast<int32_t>(table_.layers.size()), table_.num_experts,
                            options.num_slots, options.half_life_tokens})),
      scratch_(at(table_.num_experts), 0) {
  if (options.lock) memory_.lock();
  for (const std::string& path : table_.files) {
    files_.push_back(std::make_unique<io::File>(path, options.direct, ErrorKind::Checkpoint));
  }
  const size_t num_records = table_.layers.size() * at(table_.num_experts);
  slot_of_.assign(num_records, -1);
  is_touched_.assign(slots_.size(), false);
  routed_counts_.assign(num_records, 0);
  was_read_.assign(num_records, false);
  is_bad_.assign(num_records, false);
  for (int32_t slot = options.num_slots; slot-- > 0;) free_.push_back(slot);
  for (size_t row = 0; row < table_.layers.size(); ++row) {
    const size_t layer = at(table_.layers[row]);
    if (row_of_layer_.size() <= layer) row_of_layer_.resize(layer + 1, -1);
    row_of_layer_[layer] = static_cast<int32_t>(row);
  }
  const DriveOptions only{options.num_readers, kUsualBytesPerS};
  readers_ = std::make_unique<Drives>(
      table_, options.drives.empty() ? std::span(&only, 1) : std::span(options.drives));
}

ExpertStore::~ExpertStore() { close(); }

void ExpertStore::close() {
  const std::scoped_lock closing(close_mutex_);  // a second caller returns when all is closed, too
  {
    const std::scoped_lock lock(mutex_);
    is_closed_ = true;
    prefetch_.clear();
    warm_.clear();
  }
  readers_->stop();
  const std::scoped_lock lock(mutex_);
  has_stopped_ = true;
  changed_.notify_all();
  free_memory_if_unused_locked();
}

void ExpertStore::free_memory_if_unused_locked() {
  if (has_stopped_ && leases_.empty()) memory_ = io::PageBuffer();
}

// Where things are

int64_t RecordTable::largest_record() const {
  int64_t bytes = 0;
  for (const ExpertLayout& layout : layouts) bytes = std::max(bytes, layout.record_bytes);
  return bytes;
}

const ExpertLayout& ExpertStore::layout(int32_t layer) const {
  return table_.layouts[at(layer_row(layer))];
}

int32_t ExpertStore::layer_row(int32_t layer) const {
  const int32_t row =
      layer >= 0 && at(layer) < row_of_layer_.size() ? row_of_layer_[at(layer)] : -1;
  if (row < 0) {
    throw Error(ErrorKind::Shape, "layer " + std::to_string(layer) + " has no expert records");
  }
  return row;
}

int32_t ExpertStore::record_of(int32_t row, int32_t expert) const {
  if (expert < 0 || expert >= table_.num_experts) {
    throw Error(ErrorKind::Shape, "expert id out of range: " + std::to_string(expert) +
                                      "\nexpected 0 to " + std::to_string(table_.num_experts - 1));
  }
  return row * table_.num_experts + expert;
}

std::byte* ExpertStore::slot_data(int32_t slot) const {
  return memory_.data() + slot * slot_bytes_;
}

std::span<const RecordPart> ExpertStore::parts(int32_t record) const {
  const size_t count = at(table_.parts_per_record);
  return std::span(table_.parts).subspan(at(record) * count, count);
}

// Leases

std::unique_ptr<Lease> ExpertStore::acquire(int32_t layer, std::span<const int32_t> ids,
                                            int32_t num_tokens) {
  const int32_t row = layer_row(layer);
  for (const int32_t id : ids) record_of(row, id);  // checks the range before anything is counted
  std::unique_ptr<Lease> lease;                     // outlives the lock, which its end takes

  const std::scoped_lock lock(mutex_);
  if (is_closed_) throw Error(ErrorKind::ExpertRead, "the expert store is closed");
  std::fill(scratch_.begin(), scratch_.end(), 0);
  for (const int32_t id : ids) ++scratch_[at(id)];
  lease.reset(new Lease(shared_from_this(), record_of(row, 0), scratch_));
  leases_.push_back(lease.get());
  lease->is_released_ = false;
  stats_.requests += static_cast<int64_t>(lease->items().size());
  const size_t num_staged = staged_.size();
  for (Lease::Item& item : lease->items()) {
    if (hold_locked(item)) continue;
    item.is_miss = true;
    ++stats_.misses;
  }
  const Visit visit{row, ids, scratch_, num_tokens};
  route_locked(visit);
  if (options_.lookahead) {
    judge_lookahead_locked(visit, static_cast<int32_t>(num_staged - staged_.size()));
  }
  if (!prefetch_.empty()) {
    const int32_t first = row * table_.num_experts;
    std::erase_if(prefetch_, [&](int32_t record) {
      return record >= first && record < first + table_.num_experts;
    });
  }
  issue_locked(*lease);
  return lease;
}

void ExpertStore::route_locked(const Visit& visit) {
  if (policy_->visit(visit)) num_routed_tokens_ += visit.step_tokens;
  if (trace_) trace_->visit(visit.row, visit.ids, visit.step_tokens);
  const size_t first = at(visit.row) * at(table_.num_experts);
  for (size_t expert = 0; expert < visit.num_tokens.size(); ++expert) {
    routed_counts_[first + expert] += visit.num_tokens[expert];
  }
}

// Pins the item's record if it has a slot, ready or on its way, and counts the hit.
bool ExpertStore::hold_locked(Lease::Item& item) {
  const int32_t slot = slot_of_[at(item.record)];
  if (slot < 0) return false;
  Slot& held = slots_[at(slot)];
  pin_locked(slot);
  item.slot = slot;
  item.state = Lease::State::Held;
  item.is_miss = false;
  ++stats_.hits;
  if (held.is_advised) ++stats_.prefetch_hits;
  held.is_advised = false;
  if (held.is_staged) unstage_locked(slot);
  if (held.state == SlotState::Loading) {
    ++stats_.joined;
    held.load->join();
    readers_->raise(Load::jobs(held.load));
  }
  return true;
}

// Orders as many of the lease's misses as read_ahead and the slots allow, in id order. True if a
// record became ready on the spot. With nothing of the lease's in flight one more may always go, or
// a caller that keeps many records at once would wait for ever.
//
// A miss pushes out a hotter record only while fewer than num_readers are ahead: that keeps the
// drive busy. Further ones take the places of their predecessors, so a long prefill flows through a
// few slots and leaves the rest of the cache alone.
bool ExpertStore::issue_locked(Lease& lease) {
  if (is_closed_) return false;
  bool has_ready = false;
  bool is_idle = !has_read_in_flight_locked(lease);
  const int32_t num_items = static_cast<int32_t>(lease.items().size());
  for (int32_t i = lease.first_waiting_; i < num_items; ++i) {
    Lease::Item& item = lease.items()[at(i)];
    if (item.state != Lease::State::Waiting) {
      if (i == lease.first_waiting_) ++lease.first_waiting_;
      continue;
    }
    if (lease.num_ahead_ >= options_.read_ahead && !is_idle) break;
    if (hold_locked(item)) {  // another lease or a prefetch ordered it meanwhile
      --stats_.misses;
    } else {
      const bool may_evict_hotter = is_idle || lease.num_ahead_ < options_.num_readers;
      const int32_t slot = take_slot_locked(may_evict_hotter ? -1 : item.record);
      if (slot < 0) break;
      item.is_miss = true;
      item.slot = slot;
      item.state = Lease::State::Held;
      ++lease.num_ahead_;
      is_idle = false;
      start_load_locked(item.record, slot, io::Priority::Demand);
      pin_locked(slot);
    }
    has_ready |= slots_[at(item.slot)].state == SlotState::Ready;
    if (i == lease.first_waiting_) ++lease.first_waiting_;
  }
  return has_ready;
}

int32_t ExpertStore::next_ready(Lease& lease, std::span<int32_t> out) {
  std::unique_lock lock(mutex_);
  while (true) {
    if (lease.is_released_) throw Error(ErrorKind::ExpertRead, "the lease was released");
    if (!lease.error_.empty()) throw Error(ErrorKind::ExpertRead, lease.error_);
    size_t num_ready = 0;
    bool is_complete = true;
    for (size_t i = 0; i < lease.items().size() && num_ready < out.size(); ++i) {
      Lease::Item& item = lease.items()[i];
      if (item.state == Lease::State::Waiting) is_complete = false;
      if (item.state != Lease::State::Held) continue;
      is_complete = false;
      if (slots_[at(item.slot)].state != SlotState::Ready) continue;
      item.state = Lease::State::Out;
      out[num_ready++] = static_cast<int32_t>(i);
    }
    if (num_ready > 0 || is_complete || out.empty()) return static_cast<int32_t>(num_ready);
    if (is_closed_) throw Error(ErrorKind::ExpertRead, "the expert store is closed");
    if (issue_locked(lease)) continue;
    if (!has_read_in_flight_locked(lease) && steal_locked()) continue;
    // No spinning first: a read takes a millisecond or more, a wake-up some 50 us, and the drive
    // goes on with the next record meanwhile.
    const auto since = std::chrono::steady_clock::now();
    lease.is_waiting_ = true;
    changed_.wait(lock);
    lease.is_waiting_ = false;
    stats_.stall_ns += elapsed_ns(since);
  }
}

bool ExpertStore::has_read_in_flight_locked(const Lease& lease) const {
  return std::any_of(lease.items().begin(), lease.items().end(), [&](const Lease::Item& item) {
    return item.state == Lease::State::Held && slots_[at(item.slot)].state == SlotState::Loading;
  });
}

// Every slot is pinned and the thief has nothing coming: take a slot whose record no lease was
// handed yet, or leases that one thread holds at once would wait for each other. A lease whose
// thread waits in next_ready is spared: it is about to take what it holds.
bool ExpertStore::steal_locked() {
  const auto is_loose = [this](const Lease& lease, const Lease::Item& item) {
    return !lease.is_waiting_ && item.state == Lease::State::Held &&
           slots_[at(item.slot)].state == SlotState::Ready;
  };
  std::vector<int32_t> num_loose(slots_.size(), 0);
  for (const Lease* lease : leases_) {
    for (const Lease::Item& item : lease->items()) {
      if (is_loose(*lease, item)) ++num_loose[at(item.slot)];
    }
  }
  for (size_t slot = 0; slot < slots_.size(); ++slot) {
    if (num_loose[slot] == 0 || num_loose[slot] != slots_[slot].pins) continue;
    for (Lease* lease : leases_) {
      for (Lease::Item& item : lease->items()) {
        if (item.slot == static_cast<int32_t>(slot)) lose_locked(*lease, item);
      }
    }
    return true;
  }
  return false;
}

// The item goes back to waiting; if it was a hit it will be a miss, unless its record is back by
// then.
void ExpertStore::lose_locked(Lease& lease, Lease::Item& item) {
  if (item.is_miss) {
    --lease.num_ahead_;
  } else {
    --stats_.hits;
    ++stats_.misses;
  }
  item.is_miss = true;
  item.state = Lease::State::Waiting;
  lease.first_waiting_ = 0;
  ++stats_.stolen;
  unpin_locked(std::exchange(item.slot, -1));
}

void ExpertStore::done(Lease& lease, int32_t index) {
  const std::scoped_lock lock(mutex_);
  if (index < 0 || at(index) >= lease.items().size()) {
    throw Error(ErrorKind::Shape, "no record " + std::to_string(index) + " in this lease");
  }
  Lease::Item& item = lease.items()[at(index)];
  if (item.state != Lease::State::Out) return;
  item.state = Lease::State::Done;
  if (item.is_miss) --lease.num_ahead_;
  unpin_locked(std::exchange(item.slot, -1));
  issue_locked(lease);
}

void ExpertStore::release(Lease& lease) {
  const std::scoped_lock lock(mutex_);
  if (std::exchange(lease.is_released_, true)) return;
  std::erase(leases_, &lease);
  for (Lease::Item& item : lease.items()) {
    if (item.state == Lease::State::Done) continue;
    bool is_withdrawn = item.state == Lease::State::Waiting;
    if (!is_withdrawn) {
      const int32_t slot = std::exchange(item.slot, -1);
      unpin_locked(slot);
      Slot& left = slots_[at(slot)];
      if (left.state == SlotState::Loading && left.pins == 0 && withdraw_locked(left)) {
        std::erase(advised_, slot);
        free_slot_locked(slot);
        is_withdrawn = item.is_miss;
      }
    }
    item.state = Lease::State::Done;
    if (!is_withdrawn) continue;
    --stats_.requests;
    --stats_.misses;
    ++stats_.cancelled;
  }
  lease.num_ahead_ = 0;
  free_memory_if_unused_locked();
  if (!is_closed_) pump_advice_locked();
}

// Slots

void ExpertStore::pin_locked(int32_t slot) {
  Slot& pinned = slots_[at(slot)];
  if (is_candidate(pinned)) policy_->remove(pinned.record);
  ++pinned.pins;
}

void ExpertStore::unpin_locked(int32_t slot) {
  Slot& left = slots_[at(slot)];
  --left.pins;
  if (!is_candidate(left)) return;  // loading: it joins the candidates when its read ends
  policy_->insert(left.record);
  changed_.notify_all();
}

// Forgets the slot's record, if it still has one, and makes the slot free.
void ExpertStore::free_slot_locked(int32_t slot) {
  Slot& freed = slots_[at(slot)];
  if (freed.is_staged) std::erase(staged_, slot);
  if (freed.record >= 0 && slot_of_[at(freed.record)] == slot) slot_of_[at(freed.record)] = -1;
  freed = Slot{};
  free_.push_back(slot);
  changed_.notify_all();
}

// A free slot, made by eviction if need be; with `colder_than` a record, only by evicting one that
// is not hotter. -1 if there is none.
int32_t ExpertStore::take_slot_locked(int32_t colder_than) {
  if (free_.empty()) {
    const int32_t victim = policy_->victim();
    const bool may_evict =
        victim >= 0 && (colder_than < 0 || !policy_->is_hotter(victim, colder_than));
    if (may_evict) {
      evict_locked();
    } else {
      cancel_advice_locked();
      if (free_.empty()) give_up_other_staged_locked(kNoRow);
    }
  }
  return pop_free_locked();
}

int32_t ExpertStore::pop_free_locked() {
  if (free_.empty()) return -1;
  const int32_t slot = free_.back();
  free_.pop_back();
  return slot;
}

void ExpertStore::evict_locked() {
  const int32_t victim = policy_->victim();
  policy_->evict(victim);
  free_slot_locked(slot_of_[at(victim)]);
  ++stats_.evictions;
}

// Frees the slot of an advised read that nobody waits for and that has not begun.
void ExpertStore::cancel_advice_locked() {
  for (size_t i = advised_.size(); i-- > 0;) {
    const int32_t slot = advised_[i];
    if (slots_[at(slot)].pins > 0 || !withdraw_locked(slots_[at(slot)])) continue;
    advised_.erase(advised_.begin() + static_cast<std::ptrdiff_t>(i));
    free_slot_locked(slot);
    return;
  }
}

int32_t ExpertStore::resize(int32_t num_slots) {
  if (num_slots < kMinSlots || at(num_slots) > slots_.size()) {
    throw Error(ErrorKind::Config, "num_slots out of range: " + std::to_string(num_slots) +
                                       "\nexpected 2 to " + std::to_string(slots_.size()));
  }
  const std::scoped_lock lock(mutex_);
  const auto active = [this] { return static_cast<int32_t>(slots_.size() - retired_.size()); };
  while (active() > num_slots) {
    const int32_t slot = take_slot_locked(-1);
    if (slot < 0) break;
    slots_[at(slot)].state = SlotState::Retired;
    retired_.push_back(slot);
    is_touched_[at(slot)] = false;
    if (memory_.data() != nullptr) {
      memory_.discard(slot * slot_bytes_, slot_bytes_);
    }
  }
  while (active() < num_slots) {
    free_slot_locked(retired_.back());
    retired_.pop_back();
  }
  return active();
}

int32_t ExpertStore::num_slots() const {
  const std::scoped_lock lock(mutex_);
  return static_cast<int32_t>(slots_.size() - retired_.size());
}

int32_t ExpertStore::num_untouched_slots() const {
  const std::scoped_lock lock(mutex_);
  const auto is_untouched = [this](int32_t slot) { return !is_touched_[at(slot)]; };
  return static_cast<int32_t>(std::count_if(free_.begin(), free_.end(), is_untouched));
}

// Reads

void ExpertStore::start_load_locked(int32_t record, int32_t slot, io::Priority priority) {
  Slot& target = slots_[at(slot)];
  is_touched_[at(slot)] = true;
  target.record = record;
  target.state = SlotState::Loading;
  target.is_advised = priority == io::Priority::Advice;
  slot_of_[at(record)] = slot;
  const RecordPart& part = parts(record)[0];
  if (fault::is_armed() && fault::take(fault::Kind::StaleSlot, files_[at(part.file)]->path(),
                                       part.offset, part.length)) [[unlikely]] {
    target.state = SlotState::Ready;  // the planted bug: whatever the slot held before
    if (is_candidate(target)) policy_->insert(record);  // pinned next if it was demanded
    count_bytes_locked(record, priority, table_.layout_of(record).record_bytes);
    return;
  }
  if (priority == io::Priority::Advice) advised_.push_back(slot);
  const std::vector<RecordShare> shares = readers_->divide(record, priority, 0, false);
  target.load = std::make_shared<Load>(*this, record, slot, priority, shares, nullptr);
  submit_locked(target.load, priority);
}

void ExpertStore::submit_locked(const std::shared_ptr<Load>& load, io::Priority priority) {
  const Drives::Jobs jobs = Load::jobs(load);
  for (size_t i = 0; i < jobs.size(); ++i)
    readers_->submit(jobs[i], load->record(), load->shares()[i], priority);
}

// True if the read of the slot's record had not begun, and now never will.
bool ExpertStore::withdraw_locked(const Slot& slot) {
  return !is_closed_ && readers_->cancel(Load::jobs(slot.load));
}

// The record could not be had where it was read: reads it at others of its places into the same
// slot. False if there is none left.
bool ExpertStore::read_elsewhere_locked(const Load& load) {
  if (is_closed_) return false;
  const std::vector<RecordShare> shares =
      readers_->divide(load.record(), urgency_locked(load), load.tried(), load.is_doubtful());
  if (shares.empty()) return false;
  read_on_locked(load, shares, &load);
  return true;
}

// No place gave the record, but a lease came to want it after its read had begun, perhaps as advice
// and before the drive recovered: reads it once more, for that lease. False if none waits for it.
bool ExpertStore::read_again_locked(const Load& load) {
  if (is_closed_ || !load.is_joined() || slots_[at(load.slot())].pins == 0) return false;
  read_on_locked(load, readers_->divide(load.record(), io::Priority::Demand, 0, false), nullptr);
  return true;
}

void ExpertStore::read_on_locked(const Load& load, std::span<const RecordShare> shares,
                                 const Load* before) {
  const io::Priority priority = urgency_locked(load);
  std::shared_ptr<Load>& next = slots_[at(load.slot())].load;
  next = std::make_shared<Load>(*this, load.record(), load.slot(), load.priority(), shares, before);
  submit_locked(next, priority);
}

io::Priority ExpertStore::urgency_locked(const Load& load) const {
  return slots_[at(load.slot())].pins > 0 ? io::Priority::Demand : load.priority();
}

// Notes which places failed the load, so that copies there are not asked again.
void ExpertStore::blame_locked(const Load& load, bool is_had_elsewhere) {
  for (const Load::Failure& failure : load.failures()) {
    readers_->failed(load.record(), failure.place, failure.is_damaged);
    if (failure.place == 0 && !is_had_elsewhere) continue;
    ++stats_.failed_copies;
    if (copy_error_.empty()) copy_error_ = failure.error;
  }
}

void ExpertStore::count_bytes_locked(int32_t record, io::Priority priority, int64_t bytes) {
  (priority == io::Priority::Demand ? stats_.bytes_read : stats_.prefetch_bytes) += bytes;
  if (was_read_[at(record)]) stats_.reread_bytes += bytes;
  was_read_[at(record)] = true;
}

// On a reader thread. True if the load's other shares have ended, too.
bool ExpertStore::share_ended(Load& load, DriveJob& share) {
  const std::scoped_lock lock(mutex_);
  readers_->ended(share);
  return load.end_share();
}

// On a reader thread: the record is in its slot, or `error` says why not.
void ExpertStore::loaded(Load& load, std::string error, int64_t bytes_read) {
  const std::scoped_lock lock(mutex_);
  const bool is_read_elsewhere = !error.empty() && read_elsewhere_locked(load);
  if (!is_closed_) blame_locked(load, error.empty() || is_read_elsewhere);
  if (is_read_elsewhere) return;
  if (!error.empty()) {
    ++stats_.failed_reads;
    if (read_again_locked(load)) return;
  }
  Slot& slot = slots_[at(load.slot())];
  slot.load.reset();
  if (slot.pins > 0) wanted_until_ = std::chrono::steady_clock::now();
  if (load.priority() == io::Priority::Advice) std::erase(advised_, load.slot());
  is_bad_[at(load.record())] = !error.empty();
  if (error.empty()) {
    slot.state = SlotState::Ready;
    count_bytes_locked(load.record(), load.priority(), bytes_read);
    if (is_candidate(slot)) policy_->insert(load.record());
  } else {
    fail_leases_locked(load.slot(), error);
    free_slot_locked(load.slot());  // not cached: the next acquire tries again
  }
  changed_.notify_all();
  if (!is_closed_) pump_advice_locked();
}

// The leases that wanted the slot's record learn why they will not get it; the slot is theirs no
// more.
void ExpertStore::fail_leases_locked(int32_t slot, const std::string& error) {
  for (Lease* lease : leases_) {
    for (Lease::Item& item : lease->items()) {
      if (item.slot != slot) continue;
      if (item.is_miss) --lease->num_ahead_;
      item.slot = -1;
      item.state = Lease::State::Done;
      lease->error_ = error;
    }
  }
}

// Advice

void ExpertStore::prefetch(int32_t layer, std::span<const int32_t> ids) {
  const int32_t row = layer_row(layer);
  for (const int32_t id : ids) record_of(row, id);
  const std::scoped_lock lock(mutex_);
  if (is_closed_) return;
  for (const int32_t id : ids) {
    const int32_t record = record_of(row, id);
    const bool is_known = slot_of_[at(record)] >= 0 ||
                          std::find(prefetch_.begin(), prefetch_.end(), record) != prefetch_.end();
    if (!is_known) prefetch_.push_back(record);
  }
  pump_advice_locked();
}

void ExpertStore::warm(std::span<const std::pair<int32_t, int32_t>> records) {
  std::vector<int32_t> wanted;
  for (const auto& [layer, expert] : records) wanted.push_back(record_of(layer_row(layer), expert));
  const std::scoped_lock lock(mutex_);
  if (is_closed_) return;
  warm_.insert(warm_.end(), wanted.begin(), wanted.end());
  pump_advice_locked();
}

// Keeps a few advised reads with the readers: enough to keep the drive busy, few enough that slots
// are not bound to advice when a demand comes.
void ExpertStore::pump_advice_locked() {
  const size_t limit = at(options_.num_readers) * 2;
  while (advised_.size() < limit && !(prefetch_.empty() && warm_.empty())) {
    const bool is_prefetch = !prefetch_.empty();
    std::deque<int32_t>& queue = is_prefetch ? prefetch_ : warm_;
    const int32_t record = queue.front();
    queue.pop_front();
    if (slot_of_[at(record)] >= 0 || is_bad_[at(record)]) continue;
    const int32_t slot = slot_for_advice_locked(record, is_prefetch);
    if (slot >= 0) {
      start_load_locked(record, slot, io::Priority::Advice);
    } else if (!is_prefetch) {
      warm_.clear();  // no free slot is left, and warming does not evict
    }
  }
}

int32_t ExpertStore::slot_for_advice_locked(int32_t record, bool may_evict) {
  if (free_.empty() && may_evict) {
    const int32_t victim = policy_->victim();
    if (victim >= 0 && policy_->is_hotter(record, victim)) evict_locked();
  }
  return pop_free_locked();
}

// Lookahead

bool ExpertStore::wants_advice() const {
  const std::scoped_lock lock(mutex_);
  const size_t num_slots = slots_.size() - retired_.size();
  return options_.lookahead && !is_closed_ && lookahead_.is_on() && most_staged_locked(1) > 0 &&
         num_slots < slot_of_.size();
}

int32_t ExpertStore::most_staged_locked(int32_t num_tokens) const {
  const int32_t num_slots = static_cast<int32_t>(slots_.size() - retired_.size());
  if (num_tokens >= Lookahead::kManyTokens) return num_slots / kSlotsPerStagedOfMany;
  return std::min(num_slots / kSlotsPerStaged, kMostStaged);
}

void ExpertStore::look_ahead(int32_t layer, std::span<const int32_t> ids, int32_t num_tokens) {
  const int32_t row = layer_row(layer);
  for (const int32_t id : ids) record_of(row, id);
  const std::scoped_lock lock(mutex_);
  if (is_closed_ || !options_.lookahead) return;
  std::fill(scratch_.begin(), scratch_.end(), 0);
  const int32_t* slot_of_row = &slot_of_[at(record_of(row, 0))];
  for (int32_t expert = 0; expert < table_.num_experts; ++expert) {
    const bool is_bad = is_bad_[at(record_of(row, expert))];
    scratch_[at(expert)] = slot_of_row[at(expert)] < 0 && !is_bad ? 1 : 0;
  }
  const int32_t most = most_staged_locked(num_tokens);
  // A few tokens ask for many records once: these push out no hotter one.
  const bool is_scan = num_tokens > 1 && num_tokens < Lookahead::kManyTokens;
  for (const int32_t id : lookahead_.name(row, ids, num_tokens, scratch_, view_drive_locked())) {
    const int32_t record = record_of(row, id);
    const int32_t slot = staging_slot_locked(record, most, is_scan);
    if (slot < 0) break;
    slots_[at(slot)].is_staged = true;
    staged_.push_back(slot);
    start_load_locked(record, slot, io::Priority::Advice);
  }
  named_at_ = std::chrono::steady_clock::now();
  named_busy_ns_ = readers_->stats().busy_ns;
}

DriveView ExpertStore::view_drive_locked() const {
  const auto is_alone = [this](int32_t slot) { return slots_[at(slot)].pins == 0; };
  const auto waits = [this](const Lease* lease) { return has_read_in_flight_locked(*lease); };
  return {pace_.record_ns(), pace_.spare_ns(),
          static_cast<int32_t>(std::count_if(advised_.begin(), advised_.end(), is_alone)),
          std::any_of(leases_.begin(), leases_.end(), waits)};
}

// A slot for a record: one that holds a wrong guess about another layer, a free one, or that of the
// victim while fewer than `most` are staged; with `spares_hotter` only if the victim is not hotter.
int32_t ExpertStore::staging_slot_locked(int32_t record, int32_t most, bool spares_hotter) {
  const int32_t row = record / table_.num_experts;
  if (!give_up_other_staged_locked(row) && static_cast<int32_t>(staged_.size()) >= most) return -1;
  const int32_t victim = policy_->victim();
  const bool may_evict = victim >= 0 && !(spares_hotter && policy_->is_hotter(victim, record));
  if (free_.empty() && may_evict) evict_locked();
  return pop_free_locked();
}

// Frees the oldest staged slot that holds no record of the row. False if there is none.
bool ExpertStore::give_up_other_staged_locked(int32_t row) {
  for (const int32_t slot : staged_) {
    const bool is_other = slots_[at(slot)].record / table_.num_experts != row;
    if (is_other && give_up_staged_locked(slot)) return true;
  }
  return false;
}

// False if its read has begun and not ended.
bool ExpertStore::give_up_staged_locked(int32_t slot) {
  const Slot& left = slots_[at(slot)];
  if (left.state == SlotState::Loading) {
    if (!withdraw_locked(left)) return false;
    std::erase(advised_, slot);
  } else {
    lookahead_.unused();
  }
  free_slot_locked(slot);
  return true;
}

// The slot's record is in use now, and pinned: an ordinary one from here on.
void ExpertStore::unstage_locked(int32_t slot) {
  slots_[at(slot)].is_staged = false;
  std::erase(staged_, slot);
}

// Compares what was named with what the layer asks for, and withdraws the reads of what it does not
// want that have not begun.
void ExpertStore::judge_lookahead_locked(const Visit& visit, int32_t num_used) {
  measure_drive_locked();
  const double busy_ns = static_cast<double>(counted_.busy_ns - named_busy_ns_);
  lookahead_.judge(
      visit.row, visit.num_tokens,
      {.num_used = num_used,
       .unawaited_ns = static_cast<double>(elapsed_ns(std::max(named_at_, wanted_until_))),
       .idle_ns = std::max(static_cast<double>(elapsed_ns(named_at_)) - busy_ns, 0.0)});
  for (size_t i = staged_.size(); i-- > 0;) {
    const Slot& slot = slots_[at(staged_[i])];
    const bool is_wrong = slot.record / table_.num_experts == visit.row;
    if (is_wrong && slot.state == SlotState::Loading) give_up_staged_locked(staged_[i]);
  }
  if (lookahead_.is_on()) return;
  while (give_up_other_staged_locked(kNoRow)) {
  }
}

void ExpertStore::measure_drive_locked() {
  const io::ReadPoolStats readers = readers_->stats();
  const double bytes = static_cast<double>(readers.bytes_read - counted_.bytes_read);
  pace_.add(bytes / static_cast<double>(slot_bytes_),
            static_cast<double>(readers.busy_ns - counted_.busy_ns));
  counted_ = readers;
}

// Books

std::vector<double> ExpertStore::frequencies() const {
  const std::scoped_lock lock(mutex_);
  return policy_->frequencies();
}

std::vector<uint8_t> ExpertStore::held(int32_t layer) const {
  const int32_t row = layer_row(layer);
  std::vector<uint8_t> result(at(table_.num_experts));
  const std::scoped_lock lock(mutex_);
  for (int32_t expert = 0; expert < table_.num_experts; ++expert) {
    result[at(expert)] = slot_of_[at(record_of(row, expert))] >= 0 ? 1 : 0;
  }
  return result;
}

void ExpertStore::set_frequencies(std::span<const double> frequencies) {
  if (frequencies.size() != slot_of_.size()) {
    throw Error(ErrorKind::Shape, "expected " + std::to_string(slot_of_.size()) +
                                      " frequencies, got " + std::to_string(frequencies.size()));
  }
  const std::scoped_lock lock(mutex_);
  policy_->set_frequencies(frequencies);
}

std::vector<int64_t> ExpertStore::routed_counts() const {
  const std::scoped_lock lock(mutex_);
  return routed_counts_;
}

int64_t ExpertStore::num_routed_tokens() const {
  const std::scoped_lock lock(mutex_);
  return num_routed_tokens_;
}

void ExpertStore::start_trace() {
  const std::scoped_lock lock(mutex_);
  if (!trace_) trace_ = std::make_unique<TraceBuffer>(table_.num_experts);
}

void ExpertStore::trace_step(std::span<const TracePart> parts) {
  const std::scoped_lock lock(mutex_);
  if (trace_) trace_->step(parts);
}

std::vector<std::byte> ExpertStore::take_trace() {
  const std::scoped_lock lock(mutex_);
  return trace_ ? trace_->take() : std::vector<std::byte>();
}

Stats ExpertStore::stats() const {
  const io::ReadPoolStats readers = readers_->stats();
  const std::scoped_lock lock(mutex_);
  Stats snapshot = stats_;
  snapshot.read_ns = readers.read_ns;
  snapshot.drive_busy_ns = readers.busy_ns;
  snapshot.reads_in_flight_max = readers.in_flight_max;
  snapshot.lookahead = lookahead_.stats();
  snapshot.is_direct =
      std::all_of(files_.begin(), files_.end(), [](const auto& file) { return file->is_direct(); });
  return snapshot;
}

std::vector<DriveStats> ExpertStore::drive_stats() const {
  const std::scoped_lock lock(mutex_);
  return readers_->drive_stats();
}

std::string ExpertStore::copy_error() const {
  const std::scoped_lock lock(mutex_);
  return copy_error_;
}

std::string ExpertStore::debug_check() const {
  const std::scoped_lock lock(mutex_);
  std::vector<int32_t> pins(slots_.size(), 0);
  for (const Lease* lease : leases_) {
    int32_t num_ahead = 0;
    for (const Lease::Item& item : lease->items()) {
      const bool has_slot = item.state == Lease::State::Held || item.state == Lease::State::Out;
      if (has_slot != (item.slot >= 0)) return "a lease item's slot does not fit its state";
      if (has_slot) ++pins[at(item.slot)];
      if (has_slot && item.is_miss) ++num_ahead;
    }
    if (num_ahead != lease->num_ahead_) return "a lease miscounts its misses";
  }
  size_t num_free = 0;
  size_t num_retired = 0;
  size_t num_loading = 0;
  for (size_t i = 0; i < slots_.size(); ++i) {
    const Slot& slot = slots_[i];
    const std::string name = "slot " + std::to_string(i) + ": ";
    if (slot.pins != pins[i]) return name + "pins differ from the leases' items";
    const bool has_record = slot.state == SlotState::Loading || slot.state == SlotState::Ready;
    if (has_record != (slot.record >= 0)) return name + "record does not fit the state";
    if (has_record && slot_of_[at(slot.record)] != static_cast<int32_t>(i)) {
      return name + "its record is said to be elsewhere";
    }
    if ((slot.load != nullptr) != (slot.state == SlotState::Loading)) return name + "load lost";
    if (has_record && policy_->contains(slot.record) != is_candidate(slot)) {
      return name + "is wrongly a candidate for eviction, or wrongly none";
    }
    const auto times = std::count(staged_.begin(), staged_.end(), static_cast<int32_t>(i));
    if (times != (slot.is_staged ? 1 : 0)) return name + "is wrongly staged, or wrongly not";
    if (slot.is_staged && (slot.pins > 0 || !has_record))
      return name + "staged, but in use or empty";
    num_free += slot.state == SlotState::Free ? 1 : 0;
    num_retired += slot.state == SlotState::Retired ? 1 : 0;
    num_loading += slot.state == SlotState::Loading ? 1 : 0;
  }
  if (num_free != free_.size()) return "the free list misses or repeats a slot";
  if (num_retired != retired_.size()) return "the retired list misses or repeats a slot";
  if (num_loading < advised_.size()) return "the list of advised reads holds a finished one";
  for (size_t record = 0; record < slot_of_.size(); ++record) {
    const int32_t slot = slot_of_[record];
    if (slot >= 0 && slots_[at(slot)].record != static_cast<int32_t>(record)) {
      return "record " + std::to_string(record) + " points to a slot that holds another";
    }
    if (slot < 0 && policy_->contains(static_cast<int32_t>(record)))
      return "a candidate has no slot";
  }
  if (!policy_->is_consistent()) return "the eviction heap is out of order";
  if (stats_.hits + stats_.misses != stats_.requests) return "hits + misses != requests";
  return "";
}

// The lease's face

Lease::Lease(std::shared_ptr<ExpertStore> store, int32_t first_record,
             std::span<const int32_t> num_tokens)
    : store_(std::move(store)),
      layout_(&store_->table_.layout_of(first_record)),
      ids_(std::count_if(num_tokens.begin(), num_tokens.end(), [](int32_t n) { return n > 0; })),
      num_tokens_(ids_.count()),
      items_(ids_.count()) {
  int64_t index = 0;
  for (int32_t expert = 0; expert < static_cast<int32_t>(num_tokens.size()); ++expert) {
    const int32_t count = num_tokens[static_cast<size_t>(expert)];
    if (count == 0) continue;
    ids_[index] = expert;
    num_tokens_[index] = count;
    std::construct_at(&items_[index++], Item{.record = first_record + expert});
  }
}

const ExpertLayout& Lease::layout() const { return *layout_; }
int32_t Lease::next_ready(std::span<int32_t> out) { return store_->next_ready(*this, out); }
void Lease::done(int32_t index) { store_->done(*this, index); }
void Lease::release() { store_->release(*this); }

const std::byte* Lease::data(int32_t index) const {
  const std::scoped_lock lock(store_->mutex_);
  if (index < 0 || static_cast<size_t>(index) >= size() ||
      items()[static_cast<size_t>(index)].state != State::Out) {
    throw Error(ErrorKind::Shape, "record " + std::to_string(index) + " is not handed out");
  }
  return store_->slot_data(items()[static_cast<size_t>(index)].slot);
}

}  // namespace headrace::store
