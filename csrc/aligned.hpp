// Memory that begins with a cache line: a vector register that lies across two lines takes twice the time.
#pragma once

#include <cstddef>
#include <new>
#include <vector>

namespace kvsift {

template <class T>
struct LineAllocator {
  using value_type = T;
  static constexpr std::align_val_t kLine{64};

  LineAllocator() = default;
  template <class Other>
  LineAllocator(const LineAllocator<Other>&) {}
  T* allocate(std::size_t count) { return static_cast<T*>(::operator new(count * sizeof(T), kLine)); }
  void deallocate(T* data, std::size_t) { ::operator delete(data, kLine); }
  friend bool operator==(const LineAllocator&, const LineAllocator&) { return true; }
  friend bool operator!=(const LineAllocator&, const LineAllocator&) { return false; }
};

template <class T>
using Aligned = std::vector<T, LineAllocator<T>>;

}  // namespace kvsift
