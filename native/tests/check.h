// The little that the C++ tests need: a check that says where it failed, and a runner.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>
#include <source_location>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace headrace::test {

inline void check(bool is_good, std::string_view what = "check",
                  std::source_location where = std::source_location::current()) {
  if (is_good) return;
  std::fprintf(stderr, "%s:%u: failed: %.*s\n", where.file_name(),
               static_cast<unsigned>(where.line()), static_cast<int>(what.size()), what.data());
  std::abort();
}

// The message of the exception of type E that `call` must throw.
template <typename E>
std::string message_of(const std::function<void()>& call,
                       std::source_location where = std::source_location::current()) {
  try {
    call();
  } catch (const E& error) {
    return error.what();
  }
  check(false, "no exception", where);
  return "";
}

inline void check_contains(std::string_view text, std::string_view part,
                           std::source_location where = std::source_location::current()) {
  check(text.find(part) != std::string_view::npos,
        std::string("`") + std::string(part) + "` is not in: " + std::string(text), where);
}

// A folder that goes away with its contents.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::random_device seed;
    path_ = std::filesystem::temp_directory_path() / ("headrace-test-" + std::to_string(seed()));
    std::filesystem::create_directories(path_);
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  std::string path() const { return path_.string(); }
  std::string write(const std::string& name, std::span<const std::byte> bytes) const {
    const std::filesystem::path path = path_ / name;
    std::ofstream(path, std::ios::binary)
        .write(reinterpret_cast<const char*>(bytes.data()),
               static_cast<std::streamsize>(bytes.size()));
    return path.string();
  }

 private:
  std::filesystem::path path_;
};

inline std::string text_of(const std::string& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline std::vector<std::byte> random_bytes(size_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> bytes(count);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

using Test = std::pair<const char*, void (*)()>;

inline int run_all(std::span<const Test> tests) {
  for (const auto& [name, test] : tests) {
    std::printf("%s\n", name);
    std::fflush(stdout);
    try {
      test();
    } catch (const std::exception& error) {
      check(false, std::string("unexpected exception: ") + error.what());
    }
  }
  return 0;
}

}  // namespace headrace::test
