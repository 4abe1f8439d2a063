// Which instruction sets this processor runs, and which one the kernels use.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace headrace {

// In ascending order of preference. AvxVnni is Avx2 with four products in one instruction, as
// processors without AVX-512 have it since 2021. Amx is Avx512 with int8 tiles for products of many
// rows. Neon has the dot-product extension, without which an ARM processor runs the scalar kernels;
// NeonI8mm is Neon with int8 matrix products for two rows or more.
enum class Isa { Scalar, Avx2, AvxVnni, Avx512, Amx, Neon, NeonI8mm };

const char* isa_name(Isa isa);
bool is_isa_available(Isa isa);
std::vector<Isa> available_isas();

// "auto" or a name; throws Error(Config) if unknown or not supported by this processor.
Isa parse_isa(std::string_view name);

}  // namespace headrace
