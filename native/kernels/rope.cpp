#include "kernels/rope.h"

#include <cmath>

namespace headrace {

void sin_cos(double x, double& sin, double& cos) {
  constexpr double kTwoOverPi = 0.63661977236758134308;
  // pi/2 in pieces of 27 bits: a quadrant number below 2^26 times a piece is exact.
  constexpr double kPart1 = 0x1.921fb54p+0;
  constexpr double kPart2 = 0x1.10b461p-30;
  constexpr double kPart3 = 0x1.a62633145c06ep-58;
  const double quadrant = std::nearbyint(x * kTwoOverPi);
  const double r = ((x - quadrant * kPart1) - quadrant * kPart2) - quadrant * kPart3;
  const double z = r * r;
  double s = -1.0 / 1307674368000.0;  // 15!
  s = s * z + 1.0 / 6227020800.0;
  s = s * z - 1.0 / 39916800.0;
  s = s * z + 1.0 / 362880.0;
  s = s * z - 1.0 / 5040.0;
  s = s * z + 1.0 / 120.0;
  s = s * z - 1.0 / 6.0;
  const double sine = r + r * z * s;
  double c = 1.0 / 20922789888000.0;  // 16!
  c = c * z - 1.0 / 87178291200.0;
  c = c * z + 1.0 / 479001600.0;
  c = c * z - 1.0 / 3628800.0;
  c = c * z + 1.0 / 40320.0;
  c = c * z - 1.0 / 720.0;
  c = c * z + 1.0 / 24.0;
  c = c * z - 0.5;
  const double cosine = 1.0 + z * c;
  switch (static_cast<int64_t>(quadrant) & 3) {
    case 0:
      sin = sine;
      cos = cosine;
      break;
    case 1:
      sin = cosine;
      cos = -sine;
      break;
    case 2:
      sin = -sine;
      cos = -cosine;
      break;
    default:
      sin = -cosine;
      cos = sine;
      break;
  }
}

void rope_angles(const int32_t* positions, int32_t num_rows, const float* inv_freq, int32_t half,
                 float factor, float* cos, float* sin) {
  for (int64_t t = 0; t < num_rows; ++t) {
    for (int32_t i = 0; i < half; ++i) {
      const float angle = static_cast<float>(positions[t]) * inv_freq[i];
      double s = 0.0;
      double c = 0.0;
      sin_cos(static_cast<double>(angle), s, c);
      cos[t * half + i] = static_cast<float>(c) * factor;
      sin[t * half + i] = static_cast<float>(s) * factor;
    }
  }
}

double log_of(double x) {
  int exponent = 0;
  double m = std::frexp(x, &exponent);
  if (m < 0.70710678118654752440) {
    m *= 2.0;
    exponent -= 1;
  }
  // log m = 2 atanh(s), |s| < 0.172.
  const double s = (m - 1.0) / (m + 1.0);
  const double z = s * s;
  double series = 1.0 / 23.0;
  for (int n = 21; n >= 1; n -= 2) series = series * z + 1.0 / n;
  return 2.0 * s * series + exponent * 0.69314718055994530942;
}

}  // namespace headrace
