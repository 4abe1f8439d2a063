// The search for the scale of a group, sixteen outputs in the lanes: every sum runs over the inputs
// in ascending order, so that each instruction set finds the same scales.
#pragma once

#include <cstdint>

#include "kernels/quantise_table.h"

namespace headrace::HEADRACE_ISA {

inline constexpr float kRoundMagic = 12582912.0f;  // 1.5 * 2^23: leaves no bits below one
inline constexpr int32_t kRoundMagicBits = 0x4b400000;
inline constexpr float kLargestF16 = 65504.0f;

inline Floats rounded(Floats x) { return sub(add(x, splat(kRoundMagic)), splat(kRoundMagic)); }
inline Ints rounded_bits(Floats x) {
  return sub(bits_of(add(x, splat(kRoundMagic))), splat_int(kRoundMagicBits));
}
inline Floats inside(Floats x, float low, float high) {
  return min(max(x, splat(low)), splat(high));
}

// To float16's nearest, ties to even, no larger than its largest; zero becomes +0. The magic number
// follows the value's own exponent, and stops at that of the subnormals.
inline Floats rounded_to_f16(Floats x) {
  x = inside(x, -kLargestF16, kLargestF16);
  const Ints exponent = max(bit_and(bits_of(x), splat_int(0x7f800000)), splat_int(0x38800000));
  const Floats magic = mul(from_bits(exponent), splat(1.5f * 8192.0f));
  return sub(add(x, magic), magic);
}

inline Floats inverse(Floats x) {
  float lane[16];
  store(lane, x);
  for (float& value : lane) value = value != 0.0f ? 1.0f / value : 0.0f;
  return load(lane);
}

struct IntegerGrid {
  float low, high;
  Floats value(Floats x) const { return rounded(inside(x, low, high)); }
  Ints code(Floats x) const { return rounded_bits(inside(x, low, high)); }
};

// Magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6: three stairs, each clipped to its own part. Halves go to
// the even step, which is the even code.
struct E2m1Grid {
  static Floats magnitude(Floats x) { return max(x, sub(splat(0.0f), x)); }
  static Floats low(Floats a) { return mul(inside(a, 0.0f, 2.0f), splat(2.0f)); }
  static Floats middle(Floats a) { return inside(a, 2.0f, 4.0f); }
  static Floats high(Floats a) { return mul(inside(a, 4.0f, 6.0f), splat(0.5f)); }

  Floats value(Floats x) const {
    const Floats a = magnitude(x);
    const Floats first = mul(rounded(low(a)), splat(0.5f));
    const Floats second = sub(rounded(middle(a)), splat(2.0f));
    const Floats third = sub(mul(rounded(high(a)), splat(2.0f)), splat(4.0f));
    const Floats total = add(add(first, second), third);
    float lane[16], sign[16];
    store(lane, total);
    store(sign, x);
    for (int i = 0; i < 16; ++i) lane[i] = sign[i] < 0.0f ? -lane[i] : lane[i];
    return load(lane);
  }
  Ints code(Floats x) const {
    const Floats a = magnitude(x);
    const Ints steps =
        add(rounded_bits(low(a)), add(rounded_bits(middle(a)), rounded_bits(high(a))));
    int32_t lane[16];
    float sign[16];
    store(lane, sub(steps, splat_int(4)));
    store(sign, x);
    // A negative zero is the code of zero.
    for (int i = 0; i < 16; ++i) lane[i] += sign[i] < 0.0f && lane[i] != 0 ? 8 : 0;
    float held[16];
    __builtin_memcpy(held, lane, 64);
    return bits_of(load(held));
  }
};

// A group and what a squared error of each of its weights counts.
struct WeighedGroup {
  const float* weights;  // [group][16]
  int32_t group;
  alignas(64) float counts[64 * 16];  // [group][16]

  explicit WeighedGroup(const SearchGroup& source) : weights(source.weights), group(source.group) {
    if (source.importance == nullptr) {
      count_by_size();
    } else {
      for (int32_t k = 0; k < group; ++k) store(counts + k * 16, splat(source.importance[k]));
    }
  }

  // sqrt(mean square of the group + square of the weight).
  void count_by_size() {
    Floats squares = splat(0.0f);
    for (int32_t k = 0; k < group; ++k) {
      const Floats weight = load(weights + k * 16);
      squares = add(squares, mul(weight, weight));
    }
    const Floats mean = div(squares, splat(static_cast<float>(group)));
    for (int32_t k = 0; k < group; ++k) {
      const Floats weight = load(weights + k * 16);
      store(counts + k * 16, add(mean, mul(weight, weight)));
    }
    // Rounded correctly by every processor.
    for (int32_t i = 0; i < group * 16; ++i) counts[i] = __builtin_sqrtf(counts[i]);
  }
};

template <class Grid>
Floats weighted_error(const WeighedGroup& group, const Grid& grid, Floats scale) {
  const Floats factor = inverse(scale);
  Floats error = splat(0.0f);
  for (int32_t k = 0; k < group.group; ++k) {
    const Floats weight = load(group.weights + k * 16);
    const Floats code = grid.value(mul(weight, factor));
    const Floats difference = sub(weight, mul(code, scale));
    error = add(error, mul(mul(load(group.counts + k * 16), difference), difference));
  }
  return error;
}

// The scale with the least error for the codes that `scale` gives; the same one if all are zero.
inline Floats fitted_scale(const WeighedGroup& group, const IntegerGrid& grid, Floats scale) {
  const Floats factor = inverse(scale);
  Floats products = splat(0.0f), squares = splat(0.0f);
  for (int32_t k = 0; k < group.group; ++k) {
    const Floats weight = load(group.weights + k * 16);
    const Floats code = grid.value(mul(weight, factor));
    const Floats part = mul(load(group.counts + k * 16), code);
    products = add(products, mul(part, weight));
    squares = add(squares, mul(part, code));
  }
  float product[16], square[16], lane[16];
  store(product, products);
  store(square, squares);
  store(lane, scale);
  for (int i = 0; i < 16; ++i) lane[i] = square[i] > 0.0f ? product[i] / square[i] : lane[i];
  return rounded_to_f16(load(lane));
}

// The best scales so far and their errors.
struct BestScales {
  float scales[16], errors[16];

  void begin(Floats scale, Floats error) {
    store(scales, scale);
    store(errors, error);
  }
  void offer(Floats scale, Floats error) {
    float s[16], e[16];
    store(s, scale);
    store(e, error);
    for (int i = 0; i < 16; ++i) {
      scales[i] = e[i] < errors[i] ? s[i] : scales[i];
      errors[i] = e[i] < errors[i] ? e[i] : errors[i];
    }
  }
};

template <class Grid>
void take_codes(const WeighedGroup& group, const Grid& grid, FoundCodes& found) {
  const Floats scale = load(found.scales), factor = inverse(scale);
  Floats error = splat(0.0f);
  for (int32_t k = 0; k < group.group; ++k) {
    const Floats weight = load(group.weights + k * 16);
    const Floats quotient = mul(weight, factor);
    store(found.codes + k * 16, grid.code(quotient));
    const Floats difference = sub(weight, mul(grid.value(quotient), scale));
    error = add(error, mul(difference, difference));
  }
  store(found.errors, error);
}

// Of each output the first weight of largest magnitude.
inline void largest_weights(const WeighedGroup& group, float* largest) {
  float magnitude[16] = {};
  for (int i = 0; i < 16; ++i) largest[i] = 0.0f;
  for (int32_t k = 0; k < group.group; ++k) {
    const float* weights = group.weights + k * 16;
    for (int i = 0; i < 16; ++i) {
      const float m = __builtin_fabsf(weights[i]);
      largest[i] = m > magnitude[i] ? weights[i] : largest[i];
      magnitude[i] = m > magnitude[i] ? m : magnitude[i];
    }
  }
}

inline void search_integers(const SearchGroup& source, const IntegerSearch& search,
                            FoundCodes& found) {
  const WeighedGroup group(source);
  const IntegerGrid grid{search.low, search.high};
  float lane[16];
  largest_weights(group, lane);
  if (!search.is_signed) {
    for (float& value : lane) value = __builtin_fabsf(value);
  }
  const Floats largest = load(lane);
  BestScales best;
  const Floats first = rounded_to_f16(div(largest, splat(search.first)));
  best.begin(first, weighted_error(group, grid, first));
  for (int32_t i = 0; i < search.num_others; ++i) {
    const Floats scale = rounded_to_f16(div(largest, splat(search.others[i])));
    best.offer(scale, weighted_error(group, grid, scale));
  }
  for (int32_t i = 0; i < search.num_refits; ++i) {
    const Floats scale = fitted_scale(group, grid, load(best.scales));
    best.offer(scale, weighted_error(group, grid, scale));
  }
  store(found.scales, load(best.scales));
  take_codes(group, grid, found);
}

inline void search_e2m1(const SearchGroup& source, FoundCodes& found) {
  const WeighedGroup group(source);
  float largest[16], scales[3][16];
  largest_weights(group, largest);
  for (int i = 0; i < 16; ++i) {
    // A rule of the format's: floor(log2(amax)) less the exponent of its own largest value, 2.
    const int exponent = largest[i] == 0.0f ? -127 : __builtin_ilogbf(largest[i]) - 2;
    const int steps[3] = {0, 1, -1};
    for (int s = 0; s < 3; ++s) {
      const int tried = exponent + steps[s];
      scales[s][i] = __builtin_ldexpf(1.0f, tried < -127 ? -127 : tried > 127 ? 127 : tried);
    }
  }
  const E2m1Grid grid;
  BestScales best;
  best.begin(load(scales[0]), weighted_error(group, grid, load(scales[0])));
  for (int s = 1; s < 3; ++s) {
    best.offer(load(scales[s]), weighted_error(group, grid, load(scales[s])));
  }
  store(found.scales, load(best.scales));
  take_codes(group, grid, found);
}

inline constexpr QuantiseTable quantise_table{search_integers, search_e2m1};

}  // namespace headrace::HEADRACE_ISA
