// One record on its way from the drive into its slot: the blocks to read, the repacking of
// row-major matrices, the checksum, and the words for what went wrong.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "io/fault.h"
#include "io/read_pool.h"
#include "store/expert_store.h"

namespace headrace::store {

// Throws Error(Checkpoint) unless the table's sizes, ranges and layout agree with each other.
void check_table(const RecordTable& table);

class ExpertStore::Load final : public DriveJob {
 public:
  // From one of the record's places, others having been tried.
  Load(ExpertStore& store, int32_t record, int32_t slot, io::Priority priority, int32_t place,
       Drives::Places tried);

  int32_t record() const { return record_; }
  int32_t slot() const { return slot_; }
  io::Priority priority() const { return priority_; }
  int32_t place() const { return place_; }
  Drives::Places tried() const { return tried_; }
  // Once it failed: all bytes came, and are wrong.
  bool is_damaged() const { return is_damaged_; }

  int32_t num_blocks() const override { return num_blocks_; }
  io::ReadBlock block(int32_t index) const override;
  void consume(int32_t index, std::byte* bytes) override;
  void finished(const std::optional<io::ReadFailure>& failure, int64_t bytes_read) override;

 private:
  // A run of whole rows of one tensor: what one block of a record in place holds.
  struct Rows {
    int32_t part;
    int32_t first;
    int32_t count;
  };
  Rows rows(int32_t index) const;
  const RowSource& source(int32_t part) const;
  void note_bad_value(int32_t part, int64_t index);
  void finish_matrices();
  std::string read_error(const io::ReadFailure& failure) const;
  std::string value_error() const;     // empty if every value packed could be taken
  std::string checksum_error() const;  // empty if the bytes are right
  std::string name() const;
  RecordPart part(int32_t index) const;  // where it is read

  ExpertStore& store_;
  int32_t record_;
  int32_t slot_;
  io::Priority priority_;
  int32_t place_;
  Drives::Places tried_;  // this place, too
  bool is_damaged_ = false;
  int32_t num_blocks_ = 0;
  // First value that could not be taken, all of the record's tensors taken as one run of values,
  // whichever thread saw it; read after the last block.
  std::atomic<int64_t> first_bad_{INT64_MAX};
};

}  // namespace headrace::store
