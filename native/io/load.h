// Reading on behalf of a caller that waits: whole ranges into memory, and rows of a table.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "io/read_pool.h"

namespace headrace::io {

inline constexpr int64_t kDefaultBlockBytes = int64_t{1} << 20;

struct Range {
  File* file;
  int64_t offset;
  int64_t length;
  std::byte* dest;
};

// Reads every range, cut into blocks, by the pool's threads; returns when all bytes are there.
// Throws Error(kind) naming file, offset, expected and got of the first failure, once no read is in
// flight; Error(Shape) for an offset out of range.
void read_ranges(ReadPool& pool, std::span<const Range> ranges, int64_t block_bytes,
                 ErrorKind kind);

// A range with a name, and what its first checked_bytes must add up to.
struct NamedRange {
  std::string name;
  Range range;
  int64_t checked_bytes;
  std::optional<uint64_t> checksum;
};

// Reads every range, first ones first, and verifies each checksum on the thread that read the
// range's last block, while others read on. Throws Error(Checkpoint) for the first in order of
// those that failed, naming it, its file, expected and got; by then no read is in flight.
void read_named_ranges(std::span<const NamedRange> ranges, int32_t num_readers,
                       int64_t block_bytes);

// "short" or the system's words; two lines: what was expected at which offset, and what came.
std::string describe(const ReadFailure& failure);

// A row-major table in a file, read row by row: an embedding that stays on the drive.
class RowReader {
 public:
  // num_rows < 0: as many as the file holds. Throws Error(Shape) for sizes out of range.
  RowReader(std::string path, int64_t offset, int64_t row_bytes, int64_t num_rows, bool direct);

  int64_t row_bytes() const { return row_bytes_; }
  int64_t num_rows() const { return num_rows_; }
  // dest holds ids.size() rows. Throws Error(Request) for an id outside 0..num_rows - 1.
  void read(std::span<const int32_t> ids, std::byte* dest);

 private:
  File file_;
  int64_t offset_;
  int64_t row_bytes_;
  int64_t num_rows_;
  ReadPool pool_;
};

}  // namespace headrace::io
