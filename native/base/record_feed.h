// What a kernel sees of the experts: a source it asks for those that a router chose, and a feed of
// their records, which become ready one by one. The expert store implements both; kernels never
// learn where the bytes came from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace headrace {

enum class Format : uint8_t {
  F32,
  F16,
  BF16,
  Q8,
  Q4,
  MXFP4,
  Q8F,
  Q8A,
  Q4F,
  Q4A,
  F8,
  Q2K,
  Q3K,
  Q4K,
  Q5K,
  Q6K,
  Q6KA
};

// One packed matrix inside a record.
struct ExpertMatrix {
  Format format;
  int32_t rows;    // outputs
  int32_t cols;    // inputs
  int32_t group;   // inputs per scale; 1 where there are none
  int64_t offset;  // from the record's start, a multiple of 64
};

// How the records of one layer lie: shapes are those of every layer, formats may be its own.
struct ExpertLayout {
  ExpertMatrix gate, up, down;
  int64_t record_bytes;  // a multiple of 4096

  // 0 gate, 1 up, 2 down.
  const ExpertMatrix& matrix(int32_t index) const {
    return index == 0 ? gate : index == 1 ? up : down;
  }
};

class RecordFeed {
 public:
  virtual ~RecordFeed() = default;

  // Distinct expert ids in ascending order; an index below is a position in this span.
  virtual std::span<const int32_t> expert_ids() const = 0;
  virtual const ExpertLayout& layout() const = 0;

  // Blocks until at least one record that was not handed out yet is ready, and writes the indices
  // of all such records that fit `out`. Returns their number, 0 once every record was handed out.
  // Throws Error(ErrorKind::ExpertRead) when a record cannot be had.
  virtual int32_t next_ready(std::span<int32_t> out) = 0;

  // The record's bytes: valid from next_ready until done.
  virtual const std::byte* data(int32_t index) const = 0;

  // The record's bytes are no longer needed; the store may reuse their place for the next read.
  virtual void done(int32_t index) = 0;
};

class RecordSource {
 public:
  virtual ~RecordSource() = default;

  // Of the records of a layer; throws Error(Shape) for a layer that has none.
  virtual const ExpertLayout& layout(int32_t layer) const = 0;

  // Claims records of a layer. ids: the experts of `num_tokens` tokens, in any order, repeats
  // welcome. Returns at once; the end of the feed gives back what is not done. Throws Error(Shape)
  // for a layer or an id that has no record.
  virtual std::unique_ptr<RecordFeed> feed(int32_t layer, std::span<const int32_t> ids,
                                           int32_t num_tokens) = 0;

  // Advice is welcome where records have to be fetched: ids [T, A] that T tokens will probably ask
  // of a layer soon, the likeliest of each token first. It changes no result.
  virtual bool wants_advice() const { return false; }
  virtual void look_ahead(int32_t /*layer*/, std::span<const int32_t> /*ids*/,
                          int32_t /*num_tokens*/) {}
};

}  // namespace headrace
