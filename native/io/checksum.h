// The checksum of records: eight independent multiply chains over 64-byte blocks, so that one core
// keeps ahead of any drive. It finds damage; it is no defence against malice.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace headrace::io {

// hr64. Eight lanes of u64 start at lane + 1 times kLaneStep. Block by block, little endian, zero
// padded at the end: lane[i] = rotl((lane[i] ^ word[i]) * kPrime, 29). Then, from hash = length in
// bytes, in lane order: hash = (hash ^ lane[i]) * kPrime; hash ^= hash >> 32.
uint64_t checksum(std::span<const std::byte> bytes);

std::string hex(uint64_t value);  // 16 digits

}  // namespace headrace::io
