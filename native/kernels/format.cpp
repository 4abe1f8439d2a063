#include "kernels/format.h"

#include <string>

#include "base/error.h"

namespace headrace {
namespace {

struct FormatSpec {
  const char* name;
  int32_t groups[2];    // that the format has; 0: none
  int32_t code_bits;    // 0: see SuperLayout
  int32_t scale_bytes;  // of one output, with its minimum
};

constexpr FormatSpec kSpecs[kNumFormats] = {
    {"f32", {1, 0}, 32, 0},  {"f16", {1, 0}, 16, 0},  {"bf16", {1, 0}, 16, 0},
    {"q8", {32, 0}, 8, 2},   {"q4", {32, 64}, 4, 2},  {"mxfp4", {32, 0}, 4, 1},
    {"q8f", {32, 16}, 8, 4}, {"q8a", {32, 16}, 8, 8}, {"q4f", {32, 64}, 4, 4},
    {"q4a", {32, 64}, 4, 8}, {"f8", {128, 32}, 8, 4}, {"q2k", {16, 0}, 0, 0},
    {"q3k", {16, 0}, 0, 0},  {"q4k", {32, 0}, 0, 0},  {"q5k", {32, 0}, 0, 0},
    {"q6k", {16, 0}, 0, 0},  {"q6ka", {16, 0}, 0, 0},
};

constexpr const FormatSpec& spec_of(Format format) { return kSpecs[static_cast<int>(format)]; }

constexpr int64_t bytes_of_codes(Format format, int32_t group) {
  return int64_t{group} * kBlockOutputs * spec_of(format).code_bits / 8;
}

constexpr int64_t bytes_of_group(Format format, int32_t group) {
  return bytes_of_codes(format, group) + kBlockOutputs * spec_of(format).scale_bytes;
}

static_assert(bytes_of_group(Format::F32, 1) == 64);
static_assert(bytes_of_group(Format::BF16, 1) == 32);
static_assert(bytes_of_group(Format::Q8, 32) == 544);
static_assert(bytes_of_group(Format::Q4, 32) == 288);
static_assert(bytes_of_group(Format::Q4, 64) == 544);
static_assert(bytes_of_group(Format::MXFP4, 32) == 272);
static_assert(bytes_of_group(Format::Q8F, 16) == 320);
static_assert(bytes_of_group(Format::Q8A, 16) == 384);
static_assert(bytes_of_group(Format::Q4F, 64) == 576);
static_assert(bytes_of_group(Format::Q4A, 32) == 384);
static_assert(bytes_of_group(Format::F8, 128) == 2112);
static_assert(super_layout(Format::Q2K, 16).nbytes == 1600);
static_assert(super_layout(Format::Q3K, 16).nbytes == 1856);
static_assert(super_layout(Format::Q4K, 32).nbytes == 2368);
static_assert(super_layout(Format::Q5K, 32).nbytes == 2880);
static_assert(super_layout(Format::Q6K, 16).nbytes == 3392);
static_assert(super_layout(Format::Q6KA, 16).nbytes == 3648);
static_assert(static_cast<int>(Format::Q6KA) == kNumFormats - 1);

}  // namespace

const char* format_name(Format format) { return spec_of(format).name; }

Format parse_format(std::string_view name) {
  for (int i = 0; i < kNumFormats; ++i) {
    if (name == kSpecs[i].name) return static_cast<Format>(i);
  }
  std::string known = kSpecs[0].name;
  for (int i = 1; i < kNumFormats; ++i) {
    known += (i + 1 < kNumFormats ? ", " : " or ") + std::string(kSpecs[i].name);
  }
  throw Error(ErrorKind::Config,
              "unknown weight format `" + std::string(name) + "`\nexpected " + known);
}

int32_t checked_group(Format format, int32_t group) {
  if (!has_groups(format)) return 1;
  const auto& [first, second] = spec_of(format).groups;
  if (group > 0 && (group == first || group == second)) return group;
  throw Error(ErrorKind::Config, std::string("format ") + format_name(format) +
                                     " has no groups of " + std::to_string(group) + "\nexpected " +
                                     std::to_string(first) +
                                     (second == 0 ? "" : " or " + std::to_string(second)));
}

int64_t code_bytes(Format format, int32_t group) { return bytes_of_codes(format, group); }

int64_t group_bytes(Format format, int32_t group) { return bytes_of_group(format, group); }

int64_t num_groups(int32_t cols, int32_t group) { return (int64_t{cols} + group - 1) / group; }

int64_t num_blocks(int32_t rows) { return (int64_t{rows} + kBlockOutputs - 1) / kBlockOutputs; }

int64_t block_bytes(Format format, int32_t cols, int32_t group) {
  if (has_multiples(format)) {
    return num_groups(cols, kSuperInputs) * super_layout(format, group).nbytes;
  }
  return num_groups(cols, group) * group_bytes(format, group);
}

int64_t packed_bytes(Format format, int32_t rows, int32_t cols, int32_t group) {
  return num_blocks(rows) * block_bytes(format, cols, group);
}

}  // namespace headrace
