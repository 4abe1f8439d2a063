// How NumPy arrays cross into the native core: checked, never copied.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <initializer_list>
#include <string>
#include <type_traits>

#include "base/array_pool.h"
#include "base/error.h"

namespace headrace {

namespace nb = nanobind;

using AnyArray = nb::ndarray<nb::ro, nb::device::cpu>;
using WritableArray = nb::ndarray<nb::device::cpu>;

inline constexpr int64_t kAnySize = -1;

template <class T>
const char* dtype_name() {
  if constexpr (std::is_same_v<T, float>) return "float32";
  if constexpr (std::is_same_v<T, int32_t>) return "int32";
  if constexpr (std::is_same_v<T, int64_t>) return "int64";
  if constexpr (std::is_same_v<T, uint8_t>) return "uint8";
  if constexpr (std::is_same_v<T, uint16_t>) return "uint16";
  return "?";
}

template <class Array>
std::string shape_text(const Array& array) {
  std::string text = "[";
  for (size_t i = 0; i < array.ndim(); ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(array.shape(i));
  }
  text += "]";
  return text;
}

template <class Array>
bool is_contiguous(const Array& array) {
  if (array.size() == 0) return true;  // NumPy gives empty arrays any strides
  int64_t expected = 1;
  for (size_t i = array.ndim(); i-- > 0;) {
    if (array.shape(i) != 1 && array.stride(i) != expected) return false;
    expected *= static_cast<int64_t>(array.shape(i));
  }
  return true;
}

[[noreturn]] inline void throw_array(const char* op, const char* name, const std::string& expected,
                                     const std::string& got) {
  throw Error(ErrorKind::Shape,
              std::string(op) + ": array `" + name + "`\nexpected " + expected + ", got " + got);
}

// Checks dtype, rank, sizes (kAnySize passes) and C order; returns the elements.
template <class T, class Array>
auto checked(const Array& array, const char* op, const char* name,
             std::initializer_list<int64_t> sizes) {
  if (array.dtype() != nb::dtype<T>()) {
    throw_array(op, name, std::string("dtype ") + dtype_name<T>(), "another dtype");
  }
  std::string wanted = "[";
  bool is_right = array.ndim() == sizes.size();
  size_t i = 0;
  for (int64_t size : sizes) {
    if (i > 0) wanted += ", ";
    wanted += size == kAnySize ? std::string("any") : std::to_string(size);
    is_right = is_right && (size == kAnySize || static_cast<int64_t>(array.shape(i)) == size);
    ++i;
  }
  if (!is_right) throw_array(op, name, "shape " + wanted + "]", shape_text(array));
  if (!is_contiguous(array)) throw_array(op, name, "C order without gaps", "other strides");
  if constexpr (std::is_same_v<Array, AnyArray>) {
    return static_cast<const T*>(array.data());
  } else {
    return static_cast<T*>(array.data());
  }
}

// A size that the kernels count in 32 bits.
inline int32_t narrow(int64_t value, const char* op, const char* what) {
  if (value < 0 || value > INT32_MAX) {
    throw Error(ErrorKind::Shape,
                std::string(op) + ": " + what + " out of range: " + std::to_string(value));
  }
  return static_cast<int32_t>(value);
}

// A number of elements as a product of sizes, none negative: refused where it, or its bytes, cannot
// be counted.
inline void require_countable(const char* op, std::initializer_list<int64_t> sizes) {
  constexpr int64_t kMostElements = int64_t{1} << 56;
  int64_t product = 1;
  for (int64_t size : sizes) {
    if (size < 0 || (product != 0 && size > kMostElements / product)) {
      throw Error(ErrorKind::Shape, std::string(op) + ": sizes out of range");
    }
    product *= size;
  }
}

template <class T>
using NumpyArray = nb::ndarray<nb::numpy, T>;

// A result array whose memory goes back to the pool with the last reference.
template <class T>
struct Result {
  explicit Result(std::initializer_list<int64_t> sizes) {
    int64_t count = 1;
    for (int64_t size : sizes) {
      shape[ndim++] = static_cast<size_t>(size);
      count *= size;
    }
    data = static_cast<T*>(ArrayPool::shared().take(count * static_cast<int64_t>(sizeof(T))));
  }
  ~Result() {
    if (data != nullptr) ArrayPool::shared().give(data);
  }
  Result(const Result&) = delete;
  Result& operator=(const Result&) = delete;

  NumpyArray<T> array() {
    nb::capsule owner(data, [](void* p) noexcept { ArrayPool::shared().give(p); });
    T* elements = data;
    data = nullptr;
    return NumpyArray<T>(elements, ndim, shape, owner);
  }

  T* data = nullptr;
  size_t shape[4] = {};
  size_t ndim = 0;
};

}  // namespace headrace
