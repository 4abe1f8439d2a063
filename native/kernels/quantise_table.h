// What the search for scales asks of one instruction set: see quantise.h.
#pragma once

#include <cstdint>

namespace headrace {

// One group of inputs of 16 outputs.
struct SearchGroup {
  const float* weights;  // [group][16]
  // [group], each >= 0: what a squared error of that input counts. Null: an error counts
  // sqrt(mean square of that output's weights in the group + square of the weight).
  const float* importance;
  int32_t group;
};

// Codes low..high times a float16 scale. Scales tried: the weight of largest magnitude divided by
// `first`, then by each of `others`, then the best of them fitted to its own codes `num_refits`
// times. Of equally good ones the earliest stays.
struct IntegerSearch {
  float low, high;
  bool is_signed;  // the dividend keeps its sign; else it is the magnitude
  float first;
  const float* others;
  int32_t num_others, num_refits;
};

struct FoundCodes {
  float scales[16];
  int32_t codes[64 * 16];  // [group][16]; the e2m1 code, or the integer
  float errors[16];        // sums of squared differences, with nothing else counted
};

struct QuantiseTable {
  void (*integers)(const SearchGroup& group, const IntegerSearch& search, FoundCodes& found);
  // Shared exponents of e2m1: that of the largest magnitude by the format's rule, one more, one
  // less; `scales` are the powers of two.
  void (*e2m1)(const SearchGroup& group, FoundCodes& found);
};

}  // namespace headrace
