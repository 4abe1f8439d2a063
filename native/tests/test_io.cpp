// Files, the read pool, ranges, rows and the checksum, without Python.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <thread>

#include "check.h"
#include "io/checksum.h"
#include "io/fault.h"
#include "io/load.h"
#include "io/memory.h"
#include "io/read_pool.h"
#include "io/throttle.h"

using namespace headrace;
using test::check;

namespace {

// The definition of hr64, word by word.
uint64_t plain_checksum(std::span<const std::byte> bytes) {
  constexpr uint64_t kPrime = 0x9FB21C651E98DF25;
  uint64_t lanes[8];
  for (uint64_t i = 0; i < 8; ++i) lanes[i] = (i + 1) * 0x9E3779B97F4A7C15;
  const size_t num_words = (bytes.size() + 63) / 64 * 8;
  for (size_t word = 0; word < num_words; ++word) {
    uint64_t value = 0;
    for (size_t i = 0; i < 8; ++i) {
      const size_t at = word * 8 + i;
      if (at < bytes.size()) value |= static_cast<uint64_t>(bytes[at]) << (8 * i);
    }
    const uint64_t product = (lanes[word % 8] ^ value) * kPrime;
    lanes[word % 8] = product << 29 | product >> 35;
  }
  uint64_t hash = bytes.size();
  for (const uint64_t lane : lanes) {
    hash = (hash ^ lane) * kPrime;
    hash ^= hash >> 32;
  }
  return hash;
}

void test_checksum() {
  for (const size_t size : {0, 1, 7, 8, 63, 64, 65, 200, 4096}) {
    std::vector<std::byte> bytes = test::random_bytes(size, size);
    const uint64_t right = io::checksum(bytes);
    check(right == plain_checksum(bytes));
    for (size_t bit = 0; bit < size * 8; bit += 7) {
      bytes[bit / 8] ^= std::byte{1} << (bit % 8);
      check(io::checksum(bytes) != right, "a flipped bit goes unnoticed");
      bytes[bit / 8] ^= std::byte{1} << (bit % 8);
    }
  }
  // Changes of the top bits of two words of one lane must not cancel out.
  std::vector<std::byte> bytes(256);
  const uint64_t zero = io::checksum(bytes);
  bytes[7] = bytes[64 + 7] = std::byte{0x80};
  check(io::checksum(bytes) != zero);
  check(io::checksum(std::span(bytes).first(192)) != io::checksum(bytes));
  check(io::hex(0xAB) == "00000000000000ab");
}

void test_ranges() {
  const test::TemporaryFolder folder;
  const std::vector<std::byte> bytes = test::random_bytes(300'001, 1);
  const std::string path = folder.write("data.bin", bytes);
  const int64_t size = static_cast<int64_t>(bytes.size());
  for (const bool direct : {true, false}) {
    io::File file(path, direct, ErrorKind::Checkpoint);
    io::ReadPool pool(3);
    check(file.size_bytes() == size);
    io::PageBuffer memory(size + io::kAlignment);
    for (const int64_t block_bytes : {4096, 65536, 1 << 20}) {
      for (const auto& [offset, length] :
           std::vector<std::pair<int64_t, int64_t>>{{0, size},
                                                    {0, 4096},
                                                    {4096, 8192},
                                                    {1, 1},
                                                    {4095, 2},
                                                    {777, 100'000},
                                                    {size - 1, 1},
                                                    {size - 5000, 5000},
                                                    {8192, size - 8192},
                                                    {100, 0}}) {
        for (const int64_t skew : {0, 1, 512}) {
          std::byte* dest = memory.data() + skew;
          std::fill_n(dest, length, std::byte{0xEE});
          const io::Range range{&file, offset, length, dest};
          io::read_ranges(pool, {&range, 1}, block_bytes, ErrorKind::Checkpoint);
          check(std::equal(dest, dest + length, bytes.begin() + offset));
        }
      }
    }
    const io::Range beyond{&file, size - 100, 200, memory.data()};
    const std::string message = test::message_of<Error>(
        [&] { io::read_ranges(pool, {&beyond, 1}, 4096, ErrorKind::Checkpoint); });
    test::check_contains(message, "expected 200 bytes at offset 299901, got 100");
    test::check_contains(message, path);
  }
}

void test_many_ranges_of_many_files() {
  const test::TemporaryFolder folder;
  std::vector<std::unique_ptr<io::File>> files;
  std::vector<std::vector<std::byte>> contents;
  for (uint64_t i = 0; i < 4; ++i) {
    contents.push_back(test::random_bytes(50'000 + i, i));
    files.push_back(std::make_unique<io::File>(
        folder.write("file" + std::to_string(i), contents.back()), true, ErrorKind::Checkpoint));
  }
  std::vector<std::vector<std::byte>> got(contents.size());
  std::vector<io::Range> ranges;
  for (size_t i = 0; i < files.size(); ++i) {
    got[i].resize(contents[i].size());
    ranges.push_back({files[i].get(), 0, files[i]->size_bytes(), got[i].data()});
  }
  io::ReadPool pool(4);
  io::read_ranges(pool, ranges, 4096, ErrorKind::Checkpoint);
  check(got == contents);
  const io::ReadPoolStats stats = pool.stats();
  check(stats.num_reads == 4 * 13 && stats.in_flight_max >= 1 && stats.in_flight_max <= 4);
  check(stats.busy_ns > 0);
}

void test_faults_of_reads() {
  const test::TemporaryFolder folder;
  const std::vector<std::byte> bytes = test::random_bytes(100'000, 2);
  const std::string path = folder.write("data.bin", bytes);
  const auto read = [&](io::File& file) {
    io::ReadPool pool(2);
    std::vector<std::byte> got(bytes.size());
    const io::Range range{&file, 0, file.size_bytes(), got.data()};
    io::read_ranges(pool, {&range, 1}, 16384, ErrorKind::Checkpoint);
    return got;
  };
  for (const bool direct : {true, false}) {
    io::File file(path, direct, ErrorKind::Checkpoint);
    fault::inject({fault::Kind::Short, 0, -1, "data", -1});
    check(read(file) == bytes, "short reads are completed");
    check(fault::num_fired() > 7);
    fault::clear();
    fault::inject({fault::Kind::Eio, 0, 1, "data", 50'000});
    test::check_contains(test::message_of<Error>([&] { read(file); }), "errno 5");
    check(read(file) == bytes, "the fault struck once");
    fault::clear();
    fault::inject({fault::Kind::Eio, 0, -1, "other", -1});
    check(read(file) == bytes && fault::num_fired() == 0, "another file's fault");
    fault::clear();
    fault::inject({fault::Kind::Flip, 2, 1, "", -1});
    const std::vector<std::byte> flipped = read(file);
    check(flipped != bytes);
    fault::clear();
  }
  io::File file(path, true, ErrorKind::Checkpoint);
  check(file.is_direct(), "the test folder allows direct reads");
  fault::inject({fault::Kind::Einval, 1, 1, "", -1});
  check(read(file) == bytes && !file.is_direct(), "refused direct reads become buffered");
  fault::clear();
  test::check_contains(test::message_of<Error>([] { fault::parse_kind("smoke"); }), "smoke");
  test::check_contains(
      test::message_of<Error>([] { io::File("/nowhere/at/all", true, ErrorKind::Checkpoint); }),
      "/nowhere/at/all");
}

// A job that keeps a log, one block of a page each.
class LoggedJob : public io::ReadJob {
 public:
  LoggedJob(io::File& file, int32_t blocks, std::string name, std::vector<std::string>& log,
            std::mutex& mutex)
      : file_(file), blocks_(blocks), name_(std::move(name)), log_(log), mutex_(mutex) {}
  int32_t num_blocks() const override { return blocks_; }
  io::ReadBlock block(int32_t index) const override {
    return {&file_, index * io::kAlignment, io::kAlignment, nullptr};
  }
  void consume(int32_t, std::byte*) override {
    const std::scoped_lock lock(mutex_);
    log_.push_back(name_);
  }
  void finished(const std::optional<io::ReadFailure>& failure, int64_t) override {
    const std::scoped_lock lock(mutex_);
    log_.push_back(name_ +
                   (failure ? failure->error == io::kStopped ? " stopped" : " failed" : " done"));
  }

 private:
  io::File& file_;
  int32_t blocks_;
  std::string name_;
  std::vector<std::string>& log_;
  std::mutex& mutex_;
};

void test_priorities_raise_cancel_and_stop() {
  const test::TemporaryFolder folder;
  io::File file(folder.write("data.bin", test::random_bytes(40'960, 3)), true,
                ErrorKind::Checkpoint);
  std::vector<std::string> log;
  std::mutex mutex;
  const auto make = [&](int32_t blocks, const char* name) {
    return std::make_shared<LoggedJob>(file, blocks, name, log, mutex);
  };
  fault::inject(
      {fault::Kind::Delay, 0, 1, "", -1});  // holds the one reader while the rest is queued
  io::ReadPool pool(1);
  const auto first = make(1, "first");
  pool.submit(first, io::Priority::Advice);
  while (fault::num_fired() == 0) std::this_thread::yield();
  const auto advice = make(2, "advice"), raised = make(2, "raised"),
             cancelled = make(2, "cancelled"), demand = make(2, "demand");
  pool.submit(advice, io::Priority::Advice);
  pool.submit(raised, io::Priority::Advice);
  pool.submit(cancelled, io::Priority::Advice);
  pool.submit(demand, io::Priority::Demand);
  pool.raise(raised);
  check(!pool.cancel(first), "it has begun");
  check(pool.cancel(cancelled));
  const auto size = [&] {
    const std::scoped_lock lock(mutex);
    return log.size();
  };
  while (size() < 11) std::this_thread::yield();
  const std::vector<std::string> expected{"first",       "first done", "demand",     "demand",
                                          "demand done", "raised",     "raised",     "raised done",
                                          "advice",      "advice",     "advice done"};
  check(log == expected, "order of priorities");
  log.clear();
  fault::clear();

  fault::inject({fault::Kind::Delay, 0, -1, "", -1});
  pool.submit(make(10, "long"), io::Priority::Demand);
  pool.submit(make(1, "never"), io::Priority::Advice);
  while (fault::num_fired() == 0) std::this_thread::yield();
  pool.stop();
  check(std::count(log.begin(), log.end(), "long stopped") == 1);
  check(std::count(log.begin(), log.end(), "never stopped") == 1);
  pool.submit(make(1, "late"), io::Priority::Demand);
  check(log.back() == "late stopped", "a stopped pool answers at once");
  fault::clear();
}

void test_rows() {
  const test::TemporaryFolder folder;
  const std::vector<std::byte> bytes = test::random_bytes(37 + 100 * 130, 4);
  const std::string path = folder.write("rows.bin", bytes);
  io::RowReader rows(path, 37, 130, -1, true);
  check(rows.num_rows() == 100);
  const std::vector<int32_t> ids{99, 0, 7, 7, 31, 32};
  std::vector<std::byte> got(ids.size() * 130);
  rows.read(ids, got.data());
  for (size_t i = 0; i < ids.size(); ++i) {
    check(std::memcmp(got.data() + i * 130, bytes.data() + 37 + ids[i] * 130, 130) == 0);
  }
  const std::vector<int32_t> wrong{100};
  test::check_contains(test::message_of<Error>([&] { rows.read(wrong, got.data()); }), "100");
  rows.read({}, nullptr);
}

void test_page_buffer() {
  io::PageBuffer memory(10'000);
  check(memory.size_bytes() == 12'288 && io::is_aligned(memory.data()));
  memory.data()[5000] = std::byte{1};
  memory.discard(4096, 4096);
  check(memory.data()[5000] == std::byte{0});
  io::PageBuffer moved = std::move(memory);
  check(moved.data() != nullptr && memory.data() == nullptr);

  io::PageBuffer large(3 << 20);
  check(reinterpret_cast<uintptr_t>(large.data()) % (2 << 20) == 0);
  large.data()[large.size_bytes() - 1] = std::byte{1};  // all of it is there
}

void test_locked_memory() {
  io::PageBuffer memory(100'000);
  try {
    memory.lock();
  } catch (const Error& error) {  // not root, and a small limit: the message is the test then
    test::check_contains(error.what(), "RLIMIT_MEMLOCK");
    return;
  }
  check(test::text_of("/proc/self/status").find("VmLck:\t     100 kB") != std::string::npos);
  memory.data()[5000] = std::byte{1};
  memory.discard(4096, 4096);  // locked pages refuse that, unless they are unlocked before
  check(memory.data()[5000] == std::byte{0});
  check(test::text_of("/proc/self/status").find("VmLck:\t     100 kB") != std::string::npos);
}

void test_memory_nodes() {
  const test::TemporaryFolder folder;
  const std::string place = folder.path() + "/devices/system/node";
  check(io::memory_nodes(folder.path()).empty());
  std::filesystem::create_directories(place);
  const auto nodes = [&](const char* text) {
    std::ofstream(place + "/has_memory") << text << "\n";
    return io::memory_nodes(folder.path());
  };
  check(nodes("0") == std::vector<int>{0});
  check(nodes("0-1") == std::vector<int>{0, 1});
  check(nodes("0,2-4,9") == std::vector<int>{0, 2, 3, 4, 9});
  check(nodes("").empty() && nodes("what").empty());
}

void test_interleaving() {
  const std::vector<int> nodes = io::memory_nodes();
  io::PageBuffer memory(1 << 20);
  if (nodes.empty()) return;
  if (!io::interleave(memory.data(), memory.size_bytes(), nodes)) return;  // forbidden here
  check(test::text_of("/proc/self/numa_maps").find("interleave:") != std::string::npos);
  check(!io::interleave(memory.data(), memory.size_bytes(), {1000}), "no such node");
}

void test_slow_drives() {
  throttle::set({"/a", 1.0, 0.0});
  throttle::set({"/a/fast", 10.0, 7.0});
  throttle::set({"/b", 1.0, 0.0});
  throttle::set({"/b", 100.0, 0.0});  // replaces the one before
  const auto seconds_from = [](auto since, auto until) {
    return std::chrono::duration<double>(until - since).count();
  };
  // Each read is over after all before it on its drive, so what lies between two is exact.
  const auto first = throttle::take("/a/model", 100);
  const auto second = throttle::take("/a/other", 50);
  check(first && second && seconds_from(*first, *second) == 50.0, "one bucket for a drive");
  const auto before = std::chrono::steady_clock::now();
  const auto inner = throttle::take("/a/fast/model", 1000);
  check(inner && seconds_from(before, *inner) >= 107.0, "the longest prefix counts");
  const auto next = throttle::take("/a/fast/model", 1000);
  check(next && seconds_from(*inner, *next) == 100.0, "latencies pass side by side");
  const auto third = throttle::take("/b/x", 1000);
  const auto fourth = throttle::take("/b/x", 1000);
  check(third && fourth && seconds_from(*third, *fourth) == 10.0, "the later setting counts");
  check(!throttle::take("/c", 100), "another drive is as fast as it is");
  test::check_contains(test::message_of<Error>([] { throttle::set({"/a", 0.0, 0.0}); }),
                       "above zero");
  throttle::clear();
  check(!throttle::is_armed() && !throttle::take("/a", 100));

  const test::TemporaryFolder folder;
  const std::vector<std::byte> bytes = test::random_bytes(100'000, 9);
  io::File file(folder.write("data.bin", bytes), true, ErrorKind::Checkpoint);
  throttle::set({"/", 1e8, 0.001});
  io::ReadPool pool(2);
  std::vector<std::byte> got(bytes.size());
  const io::Range range{&file, 0, file.size_bytes(), got.data()};
  io::read_ranges(pool, {&range, 1}, 16384, ErrorKind::Checkpoint);
  check(got == bytes, "slow, and right");
  throttle::clear();
}

}  // namespace

int main() {
  const test::Test tests[] = {
      {"checksum", test_checksum},
      {"ranges", test_ranges},
      {"many ranges of many files", test_many_ranges_of_many_files},
      {"faults of reads", test_faults_of_reads},
      {"slow drives", test_slow_drives},
      {"priorities, raise, cancel and stop", test_priorities_raise_cancel_and_stop},
      {"rows", test_rows},
      {"page buffer", test_page_buffer},
      {"locked memory", test_locked_memory},
      {"memory nodes", test_memory_nodes},
      {"interleaving", test_interleaving},
  };
  return test::run_all(tests);
}
