#include "kernels/format.h"

#include <string>

#include "base/error.h"

namespace headrace {
namespace {

constexpr const char* kNames[kNumFormats] = {"f32", "f16", "bf16", "q8", "q4", "mxfp4"};

constexpr int64_t bytes_of_group(Format format, int32_t group) {
  switch (format) {
    case Format::F32:
      return kBlockOutputs * 4;
    case Format::F16:
    case Format::BF16:
      return kBlockOutputs * 2;
    case Format::Q8:
      return int64_t{group} * kBlockOutputs + kBlockOutputs * 2;
    case Format::Q4:
      return int64_t{group} * kBlockOutputs / 2 + kBlockOutputs * 2;
    case Format::MXFP4:
      return int64_t{group} * kBlockOutputs / 2 + kBlockOutputs;
  }
  return 0;
}

static_assert(bytes_of_group(Format::Q8, 32) == 544);
static_assert(bytes_of_group(Format::Q4, 32) == 288);
static_assert(bytes_of_group(Format::Q4, 64) == 544);
static_assert(bytes_of_group(Format::MXFP4, 32) == 272);
static_assert(static_cast<int>(Format::MXFP4) == kNumFormats - 1);

}  // namespace

const char* format_name(Format format) { return kNames[static_cast<int>(format)]; }

Format parse_format(std::string_view name) {
  for (int i = 0; i < kNumFormats; ++i) {
    if (name == kNames[i]) return static_cast<Format>(i);
  }
  throw Error(ErrorKind::Config, "unknown weight format `" + std::string(name) +
                                     "`\nexpected f32, f16, bf16, q8, q4 or mxfp4");
}

int32_t checked_group(Format format, int32_t group) {
  if (!is_quantised(format)) return 1;
  if (group == 32 || (group == 64 && format == Format::Q4)) return group;
  throw Error(ErrorKind::Config, std::string("format ") + format_name(format) +
                                     " has no groups of " + std::to_string(group) + "\nexpected " +
                                     (format == Format::Q4 ? "32 or 64" : "32"));
}

int64_t group_bytes(Format format, int32_t group) { return bytes_of_group(format, group); }

int64_t num_groups(int32_t cols, int32_t group) { return (int64_t{cols} + group - 1) / group; }

int64_t num_blocks(int32_t rows) { return (int64_t{rows} + kBlockOutputs - 1) / kBlockOutputs; }

int64_t block_bytes(Format format, int32_t cols, int32_t group) {
  return num_groups(cols, group) * group_bytes(format, group);
}

int64_t packed_bytes(Format format, int32_t rows, int32_t cols, int32_t group) {
  return num_blocks(rows) * block_bytes(format, cols, group);
}

}  // namespace headrace
