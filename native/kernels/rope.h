// Rotary position angles in double precision, by our own reduction and series.
#pragma once

#include <cstdint>

namespace headrace {

// sin and cos of x for |x| < 1e8: pi/2 is subtracted in three parts of 27 bits, then a Taylor
// series on
// [-pi/4, pi/4]; the error stays below one float32 rounding by far.
void sin_cos(double x, double& sin, double& cos);

// angle = float(position) * inv_freq[i]; cos and sin [T, half], rounded to float32, times factor.
void rope_angles(const int32_t* positions, int32_t num_rows, const float* inv_freq, int32_t half,
                 float factor, float* cos, float* sin);

// log of a positive, normal double, by its own series.
double log_of(double x);

}  // namespace headrace
