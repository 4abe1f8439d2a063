// Measuring reads: what is read, what is counted, and what a failure says.
#include <string>
#include <vector>

#include "check.h"
#include "io/fault.h"
#include "io/probe.h"

using namespace headrace;
using test::check;

namespace {

constexpr int64_t kRecord = 5 * io::kAlignment;

struct Files {
  test::TemporaryFolder folder;
  std::vector<std::string> paths{folder.write("one.bin", test::random_bytes(20 * kRecord, 1)),
                                 folder.write("two.bin", test::random_bytes(20 * kRecord, 2))};
};

std::vector<io::ProbePlace> all_places() {
  std::vector<io::ProbePlace> places;
  for (int32_t file = 0; file < 2; ++file) {
    for (int64_t i = 0; i < 20; ++i) places.push_back({file, i * kRecord});
  }
  return places;
}

void test_every_record_is_read_in_blocks() {
  const Files files;
  for (const bool direct : {true, false}) {
    for (const int32_t readers : {1, 3, 8}) {
      const io::ProbeResult result = io::probe_reads(files.paths, all_places(), kRecord,
                                                     2 * io::kAlignment, readers, direct, true);
      check(result.bytes == 40 * kRecord && result.num_reads == 40 * 3);
      check(result.elapsed_ns > 0 && result.read_ns > 0);
      check(direct || !result.is_direct);
    }
  }
  check(io::probe_reads(files.paths, {}, kRecord, kRecord, 1, true, true).bytes == 0);
}

void test_refused_direct_reads_are_told() {
  const Files files;
  fault::inject({fault::Kind::Einval, 0, -1, "two.bin", -1});
  check(!io::probe_reads(files.paths, all_places(), kRecord, kRecord, 2, true, false).is_direct);
  fault::clear();
}

void test_a_failure_names_the_file() {
  const Files files;
  for (const fault::Kind kind : {fault::Kind::Eio, fault::Kind::End}) {
    fault::inject({kind, 3, 1, "two.bin", -1});
    const std::string message = test::message_of<Error>(
        [&] { io::probe_reads(files.paths, all_places(), kRecord, kRecord, 3, true, true); });
    test::check_contains(message, "two.bin\nexpected 20480 bytes at offset");
    fault::clear();
  }
  const std::vector<io::ProbePlace> beyond{{0, 20 * kRecord}};
  test::check_contains(test::message_of<Error>([&] {
                         io::probe_reads(files.paths, beyond, kRecord, kRecord, 1, true, true);
                       }),
                       "got 0");
}

}  // namespace

int main() {
  const test::Test tests[] = {
      {"every record is read in blocks", test_every_record_is_read_in_blocks},
      {"refused direct reads are told", test_refused_direct_reads_are_told},
      {"a failure names the file", test_a_failure_names_the_file},
  };
  return test::run_all(tests);
}
