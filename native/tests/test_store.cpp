// The store under many threads, few slots and faults.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>

#include "check.h"
#include "io/checksum.h"
#include "io/fault.h"
#include "store/expert_store.h"

using namespace headrace;
using test::check;

namespace {

// Store

constexpr int64_t kRecordBytes = 3 * 4096;
constexpr int32_t kExperts = 8;
const std::vector<int32_t> kLayers{0, 3};

struct Fixture {
  test::TemporaryFolder folder;
  store::RecordTable table;
  std::vector<std::vector<std::byte>> records;  // by row and expert

  Fixture() {
    table.layers = kLayers;
    table.num_experts = kExperts;
    const ExpertLayout layout{{Format::Q8, 32, 16, 32, 0},
                              {Format::Q8, 32, 16, 32, 1088},
                              {Format::Q8, 16, 32, 32, 2176},
                              kRecordBytes};
    table.layouts = {layout, layout};
    for (size_t row = 0; row < kLayers.size(); ++row) {
      const std::vector<std::byte> bytes = test::random_bytes(kExperts * kRecordBytes, row);
      table.files.push_back(folder.write("layer" + std::to_string(row), bytes));
      for (int32_t expert = 0; expert < kExperts; ++expert) {
        table.parts.push_back({static_cast<int32_t>(row), expert * kRecordBytes, kRecordBytes});
        const auto first = bytes.begin() + expert * kRecordBytes;
        records.emplace_back(first, first + kRecordBytes);
        table.checksums.push_back(io::checksum(records.back()));
      }
    }
  }

  std::shared_ptr<store::ExpertStore> open(int32_t num_slots, int32_t num_readers = 3) const {
    store::Options options;
    options.num_slots = num_slots;
    options.num_readers = num_readers;
    options.read_ahead = 4;
    options.block_bytes = 4096;
    return store::ExpertStore::open(table, options);
  }

  bool is_right(int32_t row, int32_t expert, const std::byte* got) const {
    const auto& expected = records[static_cast<size_t>(row * kExperts + expert)];
    return std::memcmp(got, expected.data(), expected.size()) == 0;
  }
};

// Takes every record of a lease as it comes; false if a read failed or the lease was left early.
bool consume(const Fixture& fixture, store::Lease& lease, int32_t row, int32_t most = kExperts) {
  int32_t ready[kExperts];
  try {
    while (const int32_t count = lease.next_ready(ready)) {
      for (int32_t i = 0; i < count; ++i) {
        if (most-- == 0) return false;
        const int32_t expert = lease.expert_ids()[static_cast<size_t>(ready[i])];
        check(fixture.is_right(row, expert, lease.data(ready[i])), "wrong bytes");
        lease.done(ready[i]);
      }
    }
  } catch (const Error& error) {
    check(error.kind() == ErrorKind::ExpertRead);
    return false;
  }
  return true;
}

void test_every_cache_size() {
  const Fixture fixture;
  std::mt19937 random(1);
  for (int32_t num_slots = 2; num_slots <= 16; ++num_slots) {
    const auto store = fixture.open(num_slots, 1 + num_slots % 4);
    for (int step = 0; step < 60; ++step) {
      const int32_t row = step % 2;
      std::vector<int32_t> ids(4);
      for (int32_t& id : ids) id = static_cast<int32_t>(random() % kExperts);
      const auto lease = store->acquire(kLayers[static_cast<size_t>(row)], ids, 1);
      check(consume(fixture, *lease, row));
    }
    check(store->debug_check().empty(), store->debug_check());
    const store::Stats stats = store->stats();
    check(stats.bytes_read == stats.misses * kRecordBytes);
    check(stats.hits + stats.misses == stats.requests);
  }
}

// Threads that acquire, leave early, prefetch, warm, resize and fail at once.
void stress(bool has_faults) {
  const Fixture fixture;
  for (const int32_t num_slots : {2, 3, 5, 9}) {
    const auto store = fixture.open(num_slots);
    std::atomic<int64_t> num_complete{0};
    std::vector<std::thread> threads;
    for (uint32_t seed = 0; seed < 4; ++seed) {
      threads.emplace_back([&, seed] {
        std::mt19937 random(seed);
        const auto pick = [&](uint32_t limit) { return static_cast<int32_t>(random() % limit); };
        for (int step = 0; step < 150; ++step) {
          const int32_t row = pick(2);
          const int32_t layer = kLayers[static_cast<size_t>(row)];
          std::vector<int32_t> ids(static_cast<size_t>(1 + pick(6)));
          for (int32_t& id : ids) id = pick(kExperts);
          if (has_faults && pick(8) == 0) {
            constexpr fault::Kind kKinds[] = {fault::Kind::Eio, fault::Kind::End, fault::Kind::Flip,
                                              fault::Kind::Short};
            fault::inject({kKinds[pick(4)], pick(4), 1, "layer", -1});
          }
          if (pick(4) == 0) store->prefetch(kLayers[static_cast<size_t>(pick(2))], ids);
          if (pick(4) == 0) store->look_ahead(kLayers[static_cast<size_t>(pick(2))], ids, 1);
          if (pick(20) == 0) {
            const std::pair<int32_t, int32_t> warm[] = {{0, pick(kExperts)}, {3, pick(kExperts)}};
            store->warm(warm);
          }
          if (pick(30) == 0) store->resize(2 + pick(static_cast<uint32_t>(num_slots) - 1));
          const auto first = store->acquire(layer, ids, 1);
          const bool has_second = pick(3) == 0;
          const auto second = has_second ? store->acquire(layer, ids, 1) : nullptr;
          // A thread that keeps handed-out records and waits for others may wait for itself, so
          // only the last lease is left early.
          const int32_t most = pick(4) == 0 ? pick(4) : kExperts;
          num_complete += consume(fixture, *first, row, has_second ? kExperts : most) ? 1 : 0;
          if (second) consume(fixture, *second, row, most);
          if (step % 50 == 0) check(store->debug_check().empty(), store->debug_check());
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    check(store->debug_check().empty(), store->debug_check());
    check(num_complete > 50, "hardly a lease was completed");
    if (has_faults) check(store->stats().failed_reads > 0, "no fault struck");
    fault::clear();
    store->resize(num_slots);
    for (int32_t row = 0; row < 2; ++row) {  // and the store is as good as new
      std::vector<int32_t> all(kExperts);
      for (int32_t i = 0; i < kExperts; ++i) all[static_cast<size_t>(i)] = i;
      check(consume(fixture, *store->acquire(kLayers[static_cast<size_t>(row)], all, 1), row));
    }
    check(store->debug_check().empty(), store->debug_check());
  }
}

void test_stress() { stress(false); }
void test_stress_with_faults() { stress(true); }

void test_close_during_reads() {
  const Fixture fixture;
  for (int round = 0; round < 20; ++round) {
    const auto store = fixture.open(4);
    fault::inject({fault::Kind::Delay, 0, 2, "", -1});
    std::vector<std::thread> threads;
    for (int32_t row = 0; row < 2; ++row) {
      threads.emplace_back([&, row] {
        const std::vector<int32_t> all{0, 1, 2, 3, 4, 5, 6, 7};
        try {
          for (int i = 0; i < 100; ++i) {
            const auto lease = store->acquire(kLayers[static_cast<size_t>(row)], all, 1);
            if (!consume(fixture, *lease, row)) return;
          }
        } catch (const Error& error) {
          test::check_contains(error.what(), "closed");
        }
      });
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(round));
    store->close();
    for (std::thread& thread : threads) thread.join();
    check(store->debug_check().empty(), store->debug_check());
    fault::clear();
  }
}

// In place: three row-major matrices at odd places of two files.

void plain_interleave(const std::byte* source, const ExpertMatrix& matrix, int32_t rows,
                      std::byte* dest) {
  const size_t size = matrix.format == Format::F32 ? 4 : 2;
  const int32_t cols = matrix.cols;
  const int32_t padded = (rows + 15) / 16 * 16;
  for (int32_t row = 0; row < padded; ++row) {
    for (int32_t col = 0; col < cols; ++col) {
      const size_t to =
          ((static_cast<size_t>(row / 16) * static_cast<size_t>(cols) + static_cast<size_t>(col)) *
               16 +
           static_cast<size_t>(row % 16)) *
          size;
      if (row >= rows) {
        std::memset(dest + to, 0, size);
      } else {
        std::memcpy(dest + to,
                    source + (static_cast<size_t>(row) * static_cast<size_t>(cols) +
                              static_cast<size_t>(col)) *
                                 size,
                    size);
      }
    }
  }
}

class PlainRows final : public store::RowPacker {
 public:
  int64_t pack(const std::byte* source, float, const ExpertMatrix& matrix, int32_t first,
               int32_t count, std::byte* dest) const override {
    plain_interleave(source, matrix, count, dest + int64_t{first} * matrix.cols * 2);
    return -1;
  }
  Complaint complaint() const override { return {"", "", ""}; }
};

void test_records_in_place() {
  constexpr int32_t kInner = 40, kHidden = 72;  // neither a multiple of 16
  for (const int64_t start : {64, 101}) {       // an odd one as well
    const test::TemporaryFolder folder;
    const std::vector<std::byte> bytes = test::random_bytes(200'000, static_cast<uint64_t>(start));
    store::RecordTable table;
    table.files = {folder.write("a", bytes), folder.write("b", bytes)};
    table.layers = {2};
    table.num_experts = 4;
    table.parts_per_record = 3;
    const auto packer = std::make_shared<PlainRows>();
    table.sources = {{0, kInner, kHidden * 2, kHidden, 16, 2, packer},
                     {1, kInner, kHidden * 2, kHidden, 16, 2, packer},
                     {2, kHidden, kInner * 2, kInner, 16, 2, packer}};
    constexpr int64_t kUpBytes = 48 * kHidden * 2, kDownBytes = 80 * kInner * 2;
    const ExpertLayout layout{{Format::BF16, kInner, kHidden, 1, 0},
                              {Format::BF16, kInner, kHidden, 1, kUpBytes},
                              {Format::BF16, kHidden, kInner, 1, 2 * kUpBytes},
                              io::align_up(2 * kUpBytes + kDownBytes)};
    table.layouts = {layout};
    int64_t offset = start;
    for (int32_t part = 0; part < 12; ++part) {
      table.parts.push_back({part % 2, offset, kInner * kHidden * 2});
      offset += kInner * kHidden * 2 + 14;
    }
    for (const int64_t block_bytes : {4096, 1 << 20}) {
      store::Options options;
      options.block_bytes = block_bytes;
      const auto store = store::ExpertStore::open(table, options);
      const std::vector<int32_t> ids{0, 1, 2, 3};
      const auto lease = store->acquire(2, ids, 1);
      int32_t ready[4];
      int32_t seen = 0;
      while (const int32_t count = lease->next_ready(ready)) {
        for (int32_t i = 0; i < count; ++i, ++seen) {
          std::vector<std::byte> expected(static_cast<size_t>(2 * kUpBytes + kDownBytes));
          const ExpertMatrix* matrices[] = {&layout.gate, &layout.up, &layout.down};
          for (int32_t part = 0; part < 3; ++part) {
            const ExpertMatrix& one = *matrices[part];
            const store::RecordPart& place = table.parts[static_cast<size_t>(ready[i] * 3 + part)];
            plain_interleave(bytes.data() + place.offset, one, one.rows,
                             expected.data() + one.offset);
          }
          check(std::memcmp(lease->data(ready[i]), expected.data(), expected.size()) == 0,
                "in place");
          lease->done(ready[i]);
        }
      }
      check(seen == 4);
    }
    fault::inject({fault::Kind::Eio, 0, 1, "/a", table.parts[4].offset + 10});
    const auto store = store::ExpertStore::open(table, {});
    const std::vector<int32_t> ids{1};
    const auto lease = store->acquire(2, ids, 1);
    int32_t ready[1];
    const std::string message = test::message_of<Error>([&] { lease->next_ready(ready); });
    test::check_contains(message, "layer 2, expert 1, matrix up");
    fault::clear();
  }
}

// Copies of all records on two more drives. Those of one fail or are damaged now and then: every
// record is right all the same, the drive at fault is the one that is blamed, and the books stay in
// order.
void test_copies() {
  Fixture fixture;
  for (const std::string drive : {"bad", "good"}) {
    for (size_t row = 0; row < kLayers.size(); ++row) {
      std::vector<std::byte> bytes;
      for (int32_t expert = 0; expert < kExperts; ++expert) {
        const auto& record = fixture.records[row * kExperts + static_cast<size_t>(expert)];
        bytes.insert(bytes.end(), record.begin(), record.end());
        fixture.table.copies.push_back({static_cast<int32_t>(row) * kExperts + expert,
                                        static_cast<int32_t>(fixture.table.files.size()),
                                        expert * kRecordBytes});
      }
      fixture.table.files.push_back(fixture.folder.write(drive + std::to_string(row), bytes));
    }
  }
  fixture.table.drive_of_file = {0, 0, 1, 1, 2, 2};
  store::Options options;
  options.num_slots = 4;
  options.num_readers = 4;
  options.block_bytes = 4096;
  options.drives = {{2, 1e9}, {2, 2e9}, {2, 1e9}};
  const std::vector<int32_t> ids{0, 1, 2, 3, 4, 5, 6, 7};
  // A record's bytes came from more than one drive. Whole records may be the sum of parts by
  // chance, so one of the three runs must show it.
  bool has_divided = false;
  for (const auto kind : {fault::Kind::Short, fault::Kind::Flip, fault::Kind::Eio}) {
    const auto store = store::ExpertStore::open(fixture.table, options);
    fault::inject({kind, 5, 3, "bad", -1});
    for (int32_t round = 0; round < 20; ++round) {
      const int32_t row = round % 2;
      const auto lease = store->acquire(kLayers[static_cast<size_t>(row)], ids, 1);
      check(consume(fixture, *lease, row), "a record was not to be had");
      const std::string problem = store->debug_check();
      check(problem.empty(), problem.c_str());
    }
    const store::Stats stats = store->stats();
    const std::vector<store::DriveStats> drives = store->drive_stats();
    check(drives.size() == 3, "three drives");
    for (const store::DriveStats& drive : drives) {
      check(drive.bytes_read > 0, "every drive is read");
      has_divided |= drive.bytes_read % kRecordBytes != 0;
    }
    check(stats.failed_reads == 0 && drives[0].num_failed == 0 && drives[2].num_failed == 0);
    const bool is_harmful = kind != fault::Kind::Short;
    check((stats.failed_copies > 0) == is_harmful && stats.failed_copies == drives[1].num_failed);
    check(drives[1].is_given_up == (kind == fault::Kind::Eio));
    check(store->copy_error().empty() != is_harmful);
    check(!is_harmful || store->copy_error().find("bad") != std::string::npos);
    fault::clear();
  }
  check(has_divided, "no record was divided");
  fixture.table.copies[0].offset = 100;
  test::check_contains(
      test::message_of<Error>([&] { store::ExpertStore::open(fixture.table, options); }),
      "offset 100");
}

}  // namespace

int main() {
  const test::Test tests[] = {
      {"every cache size", test_every_cache_size},
      {"stress", test_stress},
      {"stress with faults", test_stress_with_faults},
      {"close during reads", test_close_during_reads},
      {"records in place", test_records_in_place},
      {"copies", test_copies},
  };
  return test::run_all(tests);
}
