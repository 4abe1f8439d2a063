// Tensors of matrices in codes, of any bytes and any size: nothing outside the buffers is touched
// (the sanitizers watch), pieces give what the whole gives, and values are those of the format.
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "base/error.h"
#include "kernels/coded.h"
#include "kernels/pack.h"
#include "tests/check.h"

namespace headrace {
namespace {

using test::check;

constexpr const char* kKinds[] = {
    "nibbles_by_output", "nibbles_by_input",  "nibbles_interleaved", "bytes",
    "scales_by_output",  "scales_by_group",   "scales_by_tile",      "zeros_by_output",
    "zeros_by_group",    "zeros_interleaved", "group_of_input"};
constexpr const char* kTypes[] = {"f32", "f16", "bf16", "e8m0", "e4m3"};

struct Held {
  Format format;
  int32_t group;
};
constexpr Held kHeld[] = {{Format::Q4F, 32},   {Format::Q4F, 64}, {Format::Q4A, 32},
                          {Format::Q4A, 64},   {Format::Q8F, 16}, {Format::Q8F, 32},
                          {Format::MXFP4, 32}, {Format::F8, 128}, {Format::F8, 32},
                          {Format::BF16, 1}};

bool is_refused(const CodedTensor& tensor, const ExpertMatrix& matrix) {
  try {
    coded_rows(tensor, matrix);
    return false;
  } catch (const Error&) {
    return true;
  }
}

std::vector<std::byte> placed(const std::vector<std::byte>& source, const CodedTensor& tensor,
                              const ExpertMatrix& matrix, int32_t step) {
  const CodedRows rows = coded_rows(tensor, matrix);
  // Exactly as large as needed, so that the first byte beyond is the sanitizer's.
  std::vector<std::byte> packed(
      static_cast<size_t>(packed_bytes(matrix.format, matrix.rows, matrix.cols, matrix.group)));
  for (int32_t first = 0; first < rows.rows; first += step) {
    const int32_t count = std::min(step, rows.rows - first);
    const auto begin = source.begin() + first * rows.row_bytes;
    const std::vector<std::byte> piece(begin, begin + count * rows.row_bytes);
    const int64_t bad =
        place_coded(piece.data(), tensor, 3.0f, matrix, first, count, packed.data());
    check(bad >= -1 && bad < int64_t{count} * rows.row_values, "a place within the rows");
  }
  finish_coded(matrix, packed.data());
  return packed;
}

void test_any_bytes() {
  int32_t num_placed = 0;
  for (const char* kind : kKinds) {
    for (const char* type : kTypes) {
      for (const Held& held : kHeld) {
        for (const int32_t rows : {1, 8, 16, 40, 136, 150}) {
          for (const int32_t cols : {64, 100, 128, 256}) {
            const CodedTensor tensor{parse_coded_kind(kind), parse_scale_type(type),
                                     ScaleFactor::Divides, held.format == Format::F8 ? 128 : 64, 1};
            const ExpertMatrix matrix{held.format, rows, cols, held.group, 0};
            if (is_refused(tensor, matrix)) continue;
            const CodedRows stored = coded_rows(tensor, matrix);
            const std::vector<std::byte> source = test::random_bytes(
                static_cast<size_t>(stored.rows * stored.row_bytes), static_cast<uint64_t>(rows));
            const std::vector<std::byte> whole = placed(source, tensor, matrix, stored.rows);
            check(placed(source, tensor, matrix, stored.granule) == whole, "pieces give the whole");
            ++num_placed;
          }
        }
      }
    }
  }
  check(num_placed > 500, "kinds are tried");
}

// A matrix of e2m1 codes counting up, whose values can be told by hand.
void test_values() {
  constexpr int32_t kRows = 20, kCols = 32;
  const ExpertMatrix matrix{Format::Q8F, kRows, kCols, 16, 0};
  const CodedTensor codes{CodedKind::NibblesByOutput, ScaleType::F32, ScaleFactor::None, 16, 0};
  const CodedTensor scales{CodedKind::ScalesByOutput, ScaleType::E4M3, ScaleFactor::Multiplies, 16,
                           0};
  std::vector<std::byte> packed(static_cast<size_t>(packed_bytes(Format::Q8F, kRows, kCols, 16)));
  std::vector<std::byte> nibbles, bits;
  for (int32_t i = 0; i < kRows * kCols; i += 2)
    nibbles.push_back(static_cast<std::byte>((i & 15) | ((i + 1) & 15) << 4));
  bits.assign(kRows * 2, std::byte{0x38});  // one
  check(place_coded(bits.data(), scales, 0.25f, matrix, 0, kRows, packed.data()) < 0);
  check(place_coded(nibbles.data(), codes, 1.0f, matrix, 0, kRows, packed.data()) < 0);
  constexpr float kNumbers[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  std::vector<float> values(kCols);
  for (int32_t row = 0; row < kRows; ++row) {
    unpack_row({packed.data(), Format::Q8F, kRows, kCols, 16}, row, values.data());
    for (int32_t k = 0; k < kCols; ++k) {
      const float number = 0.25f * kNumbers[k & 7];
      check(values[static_cast<size_t>(k)] == ((k & 8) != 0 ? -number : number), "e2m1");
    }
  }
}

void test_bad_values_have_a_place() {
  const ExpertMatrix matrix{Format::Q4A, 24, 128, 64, 0};
  std::vector<std::byte> packed(static_cast<size_t>(packed_bytes(Format::Q4A, 24, 128, 64)));
  const auto bad_of = [&](const CodedTensor& tensor, const auto& values, int32_t rows) {
    return place_coded(reinterpret_cast<const std::byte*>(values.data()), tensor, 1.0f, matrix, 0,
                       rows, packed.data());
  };
  std::vector<float> scales(24 * 2, 1.0f);
  const CodedTensor by_output{CodedKind::ScalesByOutput, ScaleType::F32, ScaleFactor::None, 64, 0};
  const CodedTensor by_group{CodedKind::ScalesByGroup, ScaleType::F32, ScaleFactor::None, 64, 0};
  check(bad_of(by_output, scales, 24) == -1 && bad_of(by_group, scales, 2) == -1);
  for (const float bad : {NAN, -INFINITY, 0x1p123f}) {
    scales[43] = bad;
    check(bad_of(by_output, scales, 24) == 43 && bad_of(by_group, scales, 2) == 43);
  }
  std::vector<int32_t> groups(128);
  for (int32_t i = 0; i < 128; ++i) groups[static_cast<size_t>(i)] = i / 64;
  const CodedTensor order{CodedKind::GroupOfInput, ScaleType::F32, ScaleFactor::None, 64, 0};
  check(bad_of(order, groups, 128) == -1);
  groups[65] = 0;
  check(bad_of(order, groups, 128) == 65);
}

}  // namespace
}  // namespace headrace

int main() {
  using namespace headrace;
  const test::Test tests[] = {
      {"any bytes", test_any_bytes},
      {"values", test_values},
      {"bad values have a place", test_bad_values_have_a_place},
  };
  return test::run_all(tests);
}
