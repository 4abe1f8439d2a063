#include "kernels/scratch.h"

#include <new>

namespace headrace {
namespace {

constexpr std::align_val_t kAlignment{64};

struct Scratch {
  std::byte* data = nullptr;
  int64_t num_bytes = 0;

  ~Scratch() { ::operator delete(data, kAlignment); }
};

}  // namespace

std::byte* thread_scratch(int64_t num_bytes) {
  thread_local Scratch scratch;
  if (num_bytes > scratch.num_bytes) {
    ::operator delete(scratch.data, kAlignment);
    scratch.data = nullptr;
    scratch.num_bytes = 0;
    scratch.data =
        static_cast<std::byte*>(::operator new(static_cast<size_t>(num_bytes), kAlignment));
    scratch.num_bytes = num_bytes;
  }
  return scratch.data;
}

}  // namespace headrace
