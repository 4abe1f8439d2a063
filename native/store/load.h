// One record on its way from its drives into its slot: the blocks that each reads, the packing of
// row-major matrices, the checksum, and the words for what went wrong.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/first_index.h"
#include "io/fault.h"
#include "io/read_pool.h"
#include "store/expert_store.h"

namespace headrace::store {

// Throws Error(Checkpoint) unless the table's sizes, ranges and layout agree with each other.
void check_table(const RecordTable& table);

class ExpertStore::Load {
 public:
  // Read as divided among its places; at least one share. `before`: the read that failed, or null.
  Load(ExpertStore& store, int32_t record, int32_t slot, io::Priority priority,
       std::span<const RecordShare> shares, const Load* before);

  int32_t record() const { return record_; }
  int32_t slot() const { return slot_; }
  io::Priority priority() const { return priority_; }
  // One of each share; they keep the load alive.
  static Drives::Jobs jobs(const std::shared_ptr<Load>& load);
  std::span<const RecordShare> shares() const { return shares_; }

  // Under the store's mutex: true for the last share that ends.
  bool end_share() { return --num_running_ == 0; }

  // Once all ended. Places that failed, and so are not to be tried again for this load, and whether
  // their bytes came and were wrong.
  struct Failure {
    int32_t place;
    bool is_damaged;
    std::string error;
  };
  const std::vector<Failure>& failures() const { return failures_; }
  Drives::Places tried() const { return tried_; }
  // Bytes of several places came and do not fit the checksum: read it whole, and they can be told.
  bool is_doubtful() const { return !doubts_.empty(); }

  // Under the store's mutex. Somebody came to want the record after this read, or the one it goes
  // on for, had begun: what struck it by then is not his affair.
  void join() { is_joined_ = true; }
  bool is_joined() const { return is_joined_; }

 private:
  // The blocks of one share: a job for its drive.
  class Share;
  // A range of which the bytes may have been wrong, with the checksum of what came.
  struct Doubt {
    RecordShare share;
    uint64_t checksum;
    std::string error;
  };
  // What one block of a record in place holds: a run of whole rows of one tensor, or all rows of
  // several that lie close together.
  struct Piece {
    int32_t begin;  // of order_, whose parts up to `end` it holds
    int32_t end;
    int32_t first;  // row, and how many; of one part only
    int32_t count;
  };
  void cut_in_place();
  void cut_parts(int32_t begin, int32_t end);
  void pack(int32_t part, int32_t first, int32_t count, std::byte* bytes);
  const RowSource& source(int32_t part) const;
  void ended(Share& share);
  std::string judge();  // what is wrong with the bytes; notes who is to blame
  void settle_doubts();
  std::span<const std::byte> bytes(const RecordShare& share) const;
  void note_bad_value(int32_t part, int64_t index);
  std::string read_error(const io::ReadFailure& failure, int32_t place) const;
  void finish_matrices();
  std::string value_error() const;  // empty if every value packed could be taken
  std::string checksum_error(int32_t place, uint64_t got) const;
  std::string name() const;
  RecordPart part(int32_t place, int32_t index) const;  // where it is read

  ExpertStore& store_;
  int32_t record_;
  int32_t slot_;
  io::Priority priority_;
  // Of a record in place: its parts by their places in the files, and the blocks to read.
  std::vector<int32_t> order_;
  std::vector<Piece> pieces_;
  std::vector<RecordShare> shares_;
  std::vector<Share> jobs_;
  size_t num_running_;
  Drives::Places tried_ = 0;
  std::vector<Failure> failures_;
  std::vector<Doubt> doubts_;
  bool is_joined_ = false;
  // First value that could not be taken, all of the record's tensors taken as one run of values,
  // whichever thread saw it; read after the last block.
  FirstIndex first_bad_;
};

class ExpertStore::Load::Share final : public DriveJob {
 public:
  Share(Load& load, const RecordShare& range);

  int32_t num_blocks() const override { return num_blocks_; }
  io::ReadBlock block(int32_t index) const override;
  void consume(int32_t index, std::byte* bytes) override;
  void finished(const std::optional<io::ReadFailure>& failure, int64_t bytes_read) override;

 private:
  friend class Load;
  Load& load_;
  RecordShare range_;
  int32_t num_blocks_ = 0;
  std::optional<io::ReadFailure> failure_;  // once it ended
  int64_t bytes_read_ = 0;
};

}  // namespace headrace::store
