#include "base/cpu.h"

#include "base/error.h"

namespace headrace {
namespace {

#if (defined(__x86_64__) || defined(_M_X64)) && (defined(__GNUC__) || defined(__clang__))
// The builtins look at CPUID and at XGETBV, so a kernel that does not save the wide registers
// counts as a processor that lacks them. Family and model numbers are never looked at: guests mask
// them.
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}

bool has_avx512_vnni() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni");
}
#else
bool has_avx2() { return false; }
bool has_avx512_vnni() { return false; }
#endif

}  // namespace

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::Scalar:
      return "scalar";
    case Isa::Avx2:
      return "avx2";
    case Isa::Avx512:
      return "avx512";
  }
  return "?";
}

bool is_isa_available(Isa isa) {
  switch (isa) {
    case Isa::Scalar:
      return true;
    case Isa::Avx2:
      return has_avx2();
    case Isa::Avx512:
      return has_avx512_vnni();
  }
  return false;
}

std::vector<Isa> available_isas() {
  std::vector<Isa> found;
  for (Isa isa : {Isa::Scalar, Isa::Avx2, Isa::Avx512}) {
    if (is_isa_available(isa)) found.push_back(isa);
  }
  return found;
}

Isa parse_isa(std::string_view name) {
  if (name == "auto") return available_isas().back();
  for (Isa isa : {Isa::Scalar, Isa::Avx2, Isa::Avx512}) {
    if (name != isa_name(isa)) continue;
    if (is_isa_available(isa)) return isa;
    throw Error(ErrorKind::Config, "instruction set `" + std::string(name) +
                                       "` is not supported by this processor\n"
                                       "hint: use `auto`");
  }
  throw Error(ErrorKind::Config, "unknown instruction set `" + std::string(name) +
                                     "`\n"
                                     "expected auto, scalar, avx2 or avx512");
}

}  // namespace headrace
