#include "io/anonymous.h"

#include <new>
#include <string>

#include "base/error.h"

#if defined(__unix__) || defined(__APPLE__)
#include <sys/mman.h>
#endif

namespace headrace {
namespace {

[[noreturn]] void throw_refused(int64_t num_bytes) {
  throw Error(ErrorKind::MemoryBudget,
              "the system refused " + std::to_string(num_bytes) + " bytes of memory");
}

}  // namespace

#if defined(__unix__) || defined(__APPLE__)
std::shared_ptr<std::byte> map_anonymous(int64_t num_bytes, PageSize page_size) {
  const size_t length = num_bytes > 0 ? static_cast<size_t>(num_bytes) : 1;
  void* address =
      ::mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (address == MAP_FAILED) throw_refused(num_bytes);
#if defined(MADV_HUGEPAGE)
  ::madvise(address, length, page_size == PageSize::Huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
#else
  (void)page_size;
#endif
  return {static_cast<std::byte*>(address), [length](std::byte* p) { ::munmap(p, length); }};
}
#else
std::shared_ptr<std::byte> map_anonymous(int64_t num_bytes, PageSize) {
  constexpr std::align_val_t alignment{4096};
  const size_t length = num_bytes > 0 ? static_cast<size_t>(num_bytes) : 1;
  void* address = ::operator new(length, alignment, std::nothrow);
  if (address == nullptr) throw_refused(num_bytes);
  return {static_cast<std::byte*>(address), [](std::byte* p) { ::operator delete(p, alignment); }};
}
#endif

}  // namespace headrace
