#include "kernels/kv_items.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "kernels/attention_table.h"
#include "kernels/small_float.h"

namespace headrace {
namespace {

// The least f16 not below amax / 127, so that no code needs clamping and the error is at most half
// a scale. NaN where x holds one, or an infinity: the whole group then shows it.
uint16_t group_scale(const float* x, int32_t count) {
  constexpr uint16_t kLargest = 0x7bff;
  uint32_t amax_bits = 0;
  for (int32_t i = 0; i < count; ++i) {
    amax_bits = std::max(amax_bits, std::bit_cast<uint32_t>(x[i]) & 0x7fffffffu);
  }
  if (amax_bits >= 0x7f800000u) return f16_from_float(std::numeric_limits<float>::quiet_NaN());
  const float exact = std::bit_cast<float>(amax_bits) / 127.0f;
  uint16_t scale = f16_from_float(exact);
  if (float_from_f16(scale) < exact) ++scale;  // the next half upwards
  return std::min(scale, kLargest);
}

int8_t code_of(float x, float scale) {
  if (!(scale > 0.0f)) return 0;
  constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, half to even
  const float code = std::clamp(x / scale, -127.0f, 127.0f);
  return static_cast<int8_t>((code + kMagic) - kMagic);
}

void put_q8(const float* x, int32_t width, const ItemPlace& place) {
  for (int32_t first = 0; first < width; first += kKvGroup) {
    const int32_t count = std::min(kKvGroup, width - first);
    const uint16_t scale = group_scale(x + first, count);
    std::memcpy(place.scales + first / kKvGroup * place.scale_stride * 2, &scale, 2);
    for (int32_t i = 0; i < count; ++i) {
      const int8_t code = code_of(x[first + i], float_from_f16(scale));
      place.items[(first + i) * place.item_stride] = static_cast<std::byte>(code);
    }
  }
}

// Sixteen-bit items: rounded in runs, which are compiled to vectors, then put in their places.
template <class Narrow>
void put_halves(const float* x, int32_t width, const ItemPlace& place, Narrow&& narrow) {
  constexpr int32_t kRun = 64;
  uint16_t run[kRun];
  for (int32_t first = 0; first < width; first += kRun) {
    const int32_t count = std::min(kRun, width - first);
    for (int32_t i = 0; i < count; ++i) run[i] = narrow(x[first + i]);
    std::byte* items = place.items + first * place.item_stride * 2;
    if (place.item_stride == 1) {
      std::memcpy(items, run, static_cast<size_t>(count) * 2);
      continue;
    }
    for (int32_t i = 0; i < count; ++i) std::memcpy(items + i * place.item_stride * 2, run + i, 2);
  }
}

}  // namespace

void put_items(Format dtype, const float* x, int32_t width, const ItemPlace& place) {
  if (dtype == Format::Q8) return put_q8(x, width, place);
  if (dtype == Format::F32) {
    for (int64_t d = 0; d < width; ++d) {
      std::memcpy(place.items + d * place.item_stride * 4, x + d, 4);
    }
    return;
  }
  if (dtype == Format::F16) {
    put_halves(x, width, place, [](float value) { return f16_from_float(value); });
  } else {
    put_halves(x, width, place, [](float value) { return bf16_from_float(value); });
  }
}

}  // namespace headrace
