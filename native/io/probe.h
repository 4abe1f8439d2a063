// How fast a drive gives records to the readers that the expert store uses: for choosing them, and
// for telling the user. Reads and forgets; keeps nothing.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "io/read_pool.h"

namespace headrace::io {

struct ProbePlace {
  int32_t file;    // position among the paths
  int64_t offset;  // where the record begins; at a multiple of kAlignment
};

struct ProbeResult {
  int64_t bytes;       // as asked for
  int64_t elapsed_ns;  // from the first record queued to the last one checked
  int64_t num_reads;   // blocks
  int64_t read_ns;     // summed over reads
  bool is_direct;      // false once any file refused direct reads
};

// Reads the record at each place once, in order, cut into blocks, by `readers` threads, exactly as
// the store would: all queued at once, and with `with_checksum` summed on the thread that read its
// last block. Opening files, starting threads and the first touch of memory are not measured.
// Holds `readers` + 1 records of memory. Throws Error(Checkpoint) naming file, offset, expected and
// got if a read fails.
ProbeResult probe_reads(std::span<const std::string> paths, std::span<const ProbePlace> places,
                        int64_t record_bytes, int64_t block_bytes, int32_t readers, bool direct,
                        bool with_checksum);

}  // namespace headrace::io
