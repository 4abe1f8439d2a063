// Rounds keys, values and latents to the type that a pool keeps.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/record_feed.h"

namespace headrace {

// Where the items of one token go: item d at items + d * item_stride items, the scale of its group
// of 32 (q8) at scales + group * scale_stride scales.
struct ItemPlace {
  std::byte* items;
  std::byte* scales;
  int64_t item_stride;
  int64_t scale_stride;
};

void put_items(Format dtype, const float* x, int32_t width, const ItemPlace& place);

}  // namespace headrace
