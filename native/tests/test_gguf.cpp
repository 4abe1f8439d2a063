// GGUF blocks of any bytes: nothing outside the buffers is touched (the sanitizers watch), bad
// scales are found, a wider format holds the same numbers, and every instruction set the same
// bytes.
#include <algorithm>
#include <cmath>
#include <iterator>
#include <vector>

#include "base/cpu.h"
#include "base/error.h"
#include "kernels/gguf_blocks.h"
#include "kernels/kernel_table.h"
#include "kernels/pack.h"
#include "tests/check.h"

namespace headrace {
namespace {

using test::check;

constexpr int32_t kTypeIds[] = {2, 3, 6, 7, 8, 10, 11, 12, 13, 14, 20, 23, 39};

struct Held {
  Format format;
  int32_t group;
};

std::vector<Held> formats_of(const GgufType& type) {
  std::vector<Held> held{{type.tightest, type.group}, {Format::Q8A, 16}};
  if (type.group == 32) held.push_back({Format::Q8A, 32});
  if (has_multiples(type.tightest)) held.push_back({Format::Q6KA, 16});
  if (type.tightest == Format::Q4K) held.push_back({Format::Q5K, 32});
  if (!has_minimum(type.tightest)) held.push_back({Format::Q8F, 16});
  return held;
}

// By each instruction set. Buffers are exactly as large as needed, so that the first byte beyond is
// the sanitizer's.
std::vector<float> values_of(const std::vector<std::byte>& source, const GgufType& type,
                             int32_t rows, int32_t cols, const Held& held, int64_t& bad) {
  const int64_t bytes = packed_bytes(held.format, rows, cols, held.group);
  std::vector<std::byte> packed(static_cast<size_t>(bytes));
  set_isa(Isa::Scalar);
  bad = repack_gguf(source.data(), type, rows, cols, held.format, held.group, packed.data());
  for (const Isa isa : available_isas()) {
    set_isa(isa);
    std::vector<std::byte> again(packed.size());
    const int64_t found =
        repack_gguf(source.data(), type, rows, cols, held.format, held.group, again.data());
    check(found == bad && again == packed, "the same bytes by every instruction set");
  }
  std::vector<float> values(static_cast<size_t>(rows) * static_cast<size_t>(cols));
  const MatrixView view{packed.data(), held.format, rows, cols, held.group};
  for (int32_t row = 0; row < rows; ++row) {
    unpack_row(view, row, values.data() + int64_t{row} * cols);
  }
  return values;
}

// Random bytes; every other time with runs of the bytes that make extreme scales and codes.
std::vector<std::byte> hostile_bytes(int64_t bytes, uint64_t seed) {
  std::vector<std::byte> source = test::random_bytes(static_cast<size_t>(bytes), seed);
  constexpr std::byte kExtremes[] = {std::byte{0x00}, std::byte{0xff}, std::byte{0x7f},
                                     std::byte{0x80}, std::byte{0x7c}, std::byte{0x01}};
  for (size_t at = 0; seed % 2 == 1 && at < source.size(); at += 97) {
    const auto length = std::to_integer<size_t>(source[at]) % 64;
    const std::byte value = kExtremes[length % std::size(kExtremes)];
    std::fill_n(source.begin() + static_cast<std::ptrdiff_t>(at),
                std::min(length, source.size() - at), value);
  }
  return source;
}

void test_any_bytes() {
  constexpr uint64_t kSeeds = 12;
  for (uint64_t round = 0; round < kSeeds * std::size(kTypeIds); ++round) {
    const int32_t id = kTypeIds[round % std::size(kTypeIds)];
    const GgufType& type = gguf_type(id);
    for (const int32_t rows : {1, 16, 37}) {
      const int32_t cols = type.block * (type.block == 32 ? 11 : 2);
      const int64_t bytes = int64_t{rows} * cols / type.block * type.nbytes;
      const std::vector<std::byte> source =
          hostile_bytes(bytes, round * 100 + static_cast<uint64_t>(rows));
      std::vector<float> first;
      int64_t first_bad = -1;
      for (const Held& held : formats_of(type)) {
        require_gguf(type, cols, held.format, held.group);
        int64_t bad;
        const std::vector<float> values = values_of(source, type, rows, cols, held, bad);
        check(bad >= -1 && bad < int64_t{rows} * cols, "a place within the matrix");
        if (first.empty()) {
          first = values;
          first_bad = bad;
          continue;
        }
        check((bad < 0) == (first_bad < 0), "bad in one format, bad in all");
        if (bad >= 0 && type.tightest == Format::MXFP4) continue;  // which has no infinity
        for (size_t i = 0; i < values.size(); ++i) {
          check(values[i] == first[i] || !std::isfinite(first[i]), "the same numbers");
        }
      }
    }
  }
}

void test_bad_scale_has_a_place() {
  const GgufType& type = gguf_type(8);
  std::vector<std::byte> source(20 * 3 * 34);
  source[(17 * 3 + 2) * 34 + 1] = std::byte{0x7c};  // the scale of row 17, group 2: infinity
  int64_t bad;
  values_of(source, type, 20, 96, {Format::Q8, 32}, bad);
  check(bad == 17 * 96 + 64, "row 17, input 64");
}

void test_what_does_not_fit_is_refused() {
  test::check_contains(test::message_of<Error>([] { gguf_type(16); }), "type 16");
  const auto refused = [](int32_t id, int32_t cols, Format format, int32_t group) {
    return test::message_of<Error>([&] { require_gguf(gguf_type(id), cols, format, group); });
  };
  test::check_contains(refused(12, 128, Format::Q4K, 32), "rows of 128 values");
  test::check_contains(refused(13, 256, Format::Q4K, 32), "format q4k");
  test::check_contains(refused(14, 256, Format::Q5K, 32), "format q5k");
  test::check_contains(refused(20, 256, Format::Q6KA, 16), "format q6ka");
  test::check_contains(refused(12, 256, Format::Q8F, 32), "format q8f");
  test::check_contains(refused(14, 256, Format::Q8F, 32), "groups of 32");
  test::check_contains(refused(8, 64, Format::Q4, 32), "format q4");
}

}  // namespace
}  // namespace headrace

int main() {
  using namespace headrace;
  const test::Test tests[] = {
      {"any bytes", test_any_bytes},
      {"a bad scale has a place", test_bad_scale_has_a_place},
      {"what does not fit is refused", test_what_does_not_fit_is_refused},
  };
  return test::run_all(tests);
}
