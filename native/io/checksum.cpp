#include "io/checksum.h"

#include <array>
#include <bit>
#include <cstring>

namespace headrace::io {
namespace {

constexpr uint64_t kPrime = 0x9FB21C651E98DF25;     // a prime with bits spread evenly
constexpr uint64_t kLaneStep = 0x9E3779B97F4A7C15;  // 2^64 over the golden ratio
constexpr size_t kBlockBytes = 64;
constexpr size_t kLanes = kBlockBytes / sizeof(uint64_t);

using Lanes = std::array<uint64_t, kLanes>;

inline void mix(Lanes& lanes, const std::byte* block) {
  Lanes words;
  std::memcpy(words.data(), block, kBlockBytes);
  for (size_t i = 0; i < kLanes; ++i) {
    // A multiplication carries a change only upwards; the rotation brings it down for the next one.
    lanes[i] = std::rotl((lanes[i] ^ words[i]) * kPrime, 29);
  }
}

}  // namespace

static_assert(std::endian::native == std::endian::little, "hr64 reads words in place");

uint64_t checksum(std::span<const std::byte> bytes) {
  Lanes lanes;
  for (size_t i = 0; i < kLanes; ++i) lanes[i] = (i + 1) * kLaneStep;
  const size_t whole = bytes.size() / kBlockBytes * kBlockBytes;
  for (size_t at = 0; at < whole; at += kBlockBytes) mix(lanes, bytes.data() + at);
  if (whole < bytes.size()) {
    std::array<std::byte, kBlockBytes> tail{};
    std::memcpy(tail.data(), bytes.data() + whole, bytes.size() - whole);
    mix(lanes, tail.data());
  }
  uint64_t hash = bytes.size();
  for (const uint64_t lane : lanes) {
    hash = (hash ^ lane) * kPrime;
    hash ^= hash >> 32;
  }
  return hash;
}

std::string hex(uint64_t value) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text(16, '0');
  for (size_t i = 16; i-- > 0; value >>= 4) text[i] = kDigits[value & 15];
  return text;
}

}  // namespace headrace::io
