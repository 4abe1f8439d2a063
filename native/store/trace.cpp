#include "store/trace.h"

#include <string>
#include <utility>

#include "base/error.h"

namespace headrace::store {
namespace {

constexpr uint64_t kStepEntry = 0;  // else: the row of a visit, plus 1
constexpr uint64_t kMaxTokens = 1 << 24;

class BlockReader {
 public:
  explicit BlockReader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  bool is_at_end() const { return at_ == bytes_.size(); }

  uint64_t varint() {
    uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      const uint64_t byte = take();
      value |= (byte & 0x7F) << shift;
      if (byte < 0x80) return value;
    }
    fail("a number is longer than 64 bits");
  }

  uint64_t below(uint64_t limit, const char* what) {
    const uint64_t value = varint();
    if (value < limit) return value;
    fail(std::string(what) + " is out of range: expected 0 to " + std::to_string(limit - 1) +
         ", got " + std::to_string(value));
  }

  int32_t id(int32_t num_experts) {
    uint64_t value = take();
    if (num_experts > 256) value |= take() << 8;
    if (value < static_cast<uint64_t>(num_experts)) return static_cast<int32_t>(value);
    fail("an expert id is out of range: expected 0 to " + std::to_string(num_experts - 1) +
         ", got " + std::to_string(value));
  }

  size_t rest() const { return bytes_.size() - at_; }

  [[noreturn]] void fail(const std::string& what) const {
    throw Error(ErrorKind::Checkpoint, what + "\nat byte " + std::to_string(at_) + " of the block");
  }

 private:
  uint64_t take() {
    if (is_at_end()) fail("the block ends inside an entry");
    return std::to_integer<uint64_t>(bytes_[at_++]);
  }

  std::span<const std::byte> bytes_;
  size_t at_ = 0;
};

}  // namespace

void TraceBuffer::put(uint64_t value) {
  for (; value >= 0x80; value >>= 7) bytes_.push_back(static_cast<std::byte>(value | 0x80));
  bytes_.push_back(static_cast<std::byte>(value));
}

void TraceBuffer::step(std::span<const TracePart> parts) {
  put(kStepEntry);
  put(parts.size());
  for (const TracePart& part : parts) {
    put(part.sequence);
    put(static_cast<uint64_t>(part.num_tokens) * 2 + (part.is_prefill ? 1 : 0));
  }
}

void TraceBuffer::visit(int32_t row, std::span<const int32_t> ids, int32_t num_tokens) {
  put(static_cast<uint64_t>(row) + 1);
  put(static_cast<uint64_t>(num_tokens));
  put(num_tokens > 0 ? ids.size() / static_cast<size_t>(num_tokens) : 0);
  for (const int32_t id : ids) {
    bytes_.push_back(static_cast<std::byte>(id));
    if (has_wide_ids_) bytes_.push_back(static_cast<std::byte>(id >> 8));
  }
}

std::vector<std::byte> TraceBuffer::take() { return std::exchange(bytes_, {}); }

void Trace::add(std::span<const std::byte> block) {
  BlockReader reader(block);
  while (!reader.is_at_end()) {
    const uint64_t entry = reader.below(static_cast<uint64_t>(num_rows) + 1, "a layer");
    if (entry == kStepEntry) {
      Step step{visits.size(), 0, 0};
      for (uint64_t left = reader.below(kMaxTokens, "the number of parts"); left > 0; --left) {
        reader.varint();  // the sequence: for other readers
        const uint64_t tokens = reader.below(kMaxTokens, "the number of tokens");
        (tokens % 2 == 1 ? step.num_prefill_tokens : step.num_decode_tokens) +=
            static_cast<int32_t>(tokens / 2);
      }
      steps.push_back(step);
      continue;
    }
    const uint64_t tokens = reader.below(kMaxTokens, "the number of tokens");
    const uint64_t active =
        reader.below(static_cast<uint64_t>(num_experts) + 1, "the number of experts per token");
    if (tokens * active > reader.rest()) reader.fail("the block ends inside an entry");
    const size_t first = ids.size();
    for (uint64_t i = 0; i < tokens * active; ++i) ids.push_back(reader.id(num_experts));
    visits.push_back({static_cast<int32_t>(entry) - 1, static_cast<int32_t>(tokens),
                      static_cast<int32_t>(active), first});
  }
}

std::span<const int32_t> Trace::ids_of(const Visit& visit) const {
  return std::span(ids).subspan(visit.first_id, static_cast<size_t>(visit.num_tokens) *
                                                    static_cast<size_t>(visit.num_active));
}

}  // namespace headrace::store
