// Packing that searches: for each group of a matrix the scale whose codes lie nearest, by squared
// error, instead of the one that its largest weight gives. Layouts are those of format.h.
//
// quant_search.py is the specification; both give equal bytes.
#pragma once

#include <cstdint>
#include <string>

#include "base/thread_pool.h"
#include "kernels/pack.h"

namespace headrace {

// What was lost: sums over all weights.
struct QuantiseLoss {
  double squared_error = 0.0, squares = 0.0;
};

bool can_search(Format format);

// Packs `source` in q4, q8 or mxfp4. `importance` [cols] says what a squared error of each input
// counts; null counts errors by the
// size of their weights, as quantise_table.h says. Throws what `pack` throws.
QuantiseLoss quantise(ThreadPool& pool, const RowMajor& source, Format format, int32_t group,
                      const float* importance, const std::string& name, std::byte* packed);

}  // namespace headrace
