#include "base/cpu.h"

#if (defined(__x86_64__) || defined(_M_X64)) && (defined(__GNUC__) || defined(__clang__))
#include <cpuid.h>
#endif

#if defined(__linux__) && defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__linux__) && defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#elif defined(__APPLE__) && defined(__aarch64__)
#include <sys/sysctl.h>
#endif

#include "base/error.h"

namespace headrace {
namespace {

constexpr Isa kIsas[] = {Isa::Scalar, Isa::Avx2, Isa::AvxVnni, Isa::Avx512,
                         Isa::Amx,    Isa::Neon, Isa::NeonI8mm};

#if (defined(__x86_64__) || defined(_M_X64)) && (defined(__GNUC__) || defined(__clang__))
// The builtins look at CPUID and at XGETBV, so a kernel that does not save the wide registers
// counts as a processor that lacks them. Family and model numbers are never looked at: guests mask
// them.
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}

// Clang's builtin knows no name for it. Bit 4 of EAX in leaf 7, subleaf 1.
bool has_avx_vnni() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return has_avx2() && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 && (eax >> 4 & 1) != 0;
}

bool has_avx512_vnni() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni");
}
#else
bool has_avx2() { return false; }
bool has_avx_vnni() { return false; }
bool has_avx512_vnni() { return false; }
#endif

#if defined(__linux__) && defined(__x86_64__)
// The kernel gives tile registers only to a process that asked, and refuses when a signal stack is
// too small to hold them. The answer holds for all threads of the process.
bool may_use_tiles() {
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;               // the state component XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

bool has_amx_int8() {
  static const bool has =
      has_avx512_vnni() && __builtin_cpu_supports("gfni") && __builtin_cpu_supports("avx512vbmi") &&
      __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-int8") && may_use_tiles();
  return has;
}
#else
bool has_amx_int8() { return false; }
#endif

#if defined(__aarch64__) && defined(__linux__)
bool has_neon_dot_product() { return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0; }
bool has_neon_i8mm() { return has_neon_dot_product() && (getauxval(AT_HWCAP2) & HWCAP2_I8MM) != 0; }
#elif defined(__aarch64__) && defined(__APPLE__)
bool has_feature(const char* name) {
  int value = 0;
  size_t num_bytes = sizeof value;
  return sysctlbyname(name, &value, &num_bytes, nullptr, 0) == 0 && value != 0;
}
bool has_neon_dot_product() { return has_feature("hw.optional.arm.FEAT_DotProd"); }
bool has_neon_i8mm() { return has_neon_dot_product() && has_feature("hw.optional.arm.FEAT_I8MM"); }
#else
bool has_neon_dot_product() { return false; }
bool has_neon_i8mm() { return false; }
#endif

std::string names_of_isas() {
  std::string names = "auto";
  for (const Isa& isa : kIsas) {
    names += &isa == std::end(kIsas) - 1 ? " or " : ", ";
    names += isa_name(isa);
  }
  return names;
}

}  // namespace

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::Scalar:
      return "scalar";
    case Isa::Avx2:
      return "avx2";
    case Isa::AvxVnni:
      return "avx-vnni";
    case Isa::Avx512:
      return "avx512";
    case Isa::Amx:
      return "amx";
    case Isa::Neon:
      return "neon";
    case Isa::NeonI8mm:
      return "neon-i8mm";
  }
  return "?";
}

bool is_isa_available(Isa isa) {
  switch (isa) {
    case Isa::Scalar:
      return true;
    case Isa::Avx2:
      return has_avx2();
    case Isa::AvxVnni:
      return has_avx_vnni();
    case Isa::Avx512:
      return has_avx512_vnni();
    case Isa::Amx:
      return has_amx_int8();
    case Isa::Neon:
      return has_neon_dot_product();
    case Isa::NeonI8mm:
      return has_neon_i8mm();
  }
  return false;
}

std::vector<Isa> available_isas() {
  std::vector<Isa> found;
  for (Isa isa : kIsas) {
    if (is_isa_available(isa)) found.push_back(isa);
  }
  return found;
}

Isa parse_isa(std::string_view name) {
  if (name == "auto") return available_isas().back();
  for (Isa isa : kIsas) {
    if (name != isa_name(isa)) continue;
    if (is_isa_available(isa)) return isa;
    throw Error(ErrorKind::Config, "instruction set `" + std::string(name) +
                                       "` is not supported by this processor\n"
                                       "hint: use `auto`");
  }
  throw Error(ErrorKind::Config, "unknown instruction set `" + std::string(name) +
                                     "`\n"
                                     "expected " +
                                     names_of_isas());
}

}  // namespace headrace
