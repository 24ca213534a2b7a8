// Huge pages, and the speed at which memory is read.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>

#include "isa/isa.hpp"
#include "parallel.hpp"

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace kvsift {

// Requests huge pages for the whole pages of [data, data + bytes) -> bytes of the request.
inline std::int64_t advise_huge(void* data, std::int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const std::uintptr_t start = (reinterpret_cast<std::uintptr_t>(data) + page - 1) / page * page;
  const std::uintptr_t stop = (reinterpret_cast<std::uintptr_t>(data) + static_cast<std::uintptr_t>(bytes)) / page * page;
  if (start < stop && madvise(reinterpret_cast<void*>(start), stop - start, MADV_HUGEPAGE) == 0)
    return static_cast<std::int64_t>(stop - start);
#else
  (void)data, (void)bytes;
#endif
  return 0;
}

// Seconds to read [data, data + bytes) once.
inline double read_seconds(const void* data, std::int64_t bytes, int threads) {
  constexpr std::int64_t kPart = 1 << 20;
  const std::int64_t parts = (bytes + kPart - 1) / kPart;
  std::atomic<std::uint64_t> total{0};
  const auto start = std::chrono::steady_clock::now();
  parallel_for(parts, threads, [&](std::int64_t part, int) {
    const std::int64_t start = part * kPart, count = bytes - start < kPart ? bytes - start : kPart;
    total.fetch_add(kernels().read(static_cast<const char*>(data) + start, count), std::memory_order_relaxed);
  });
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace kvsift
