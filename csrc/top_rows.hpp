// The largest scores of every row of a matrix.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "numbers.hpp"
#include "parallel.hpp"
#include "top_k.hpp"

namespace kvsift {

// Integers in the order of floats of either size: compilers vectorise the maximum of integers, but not that of floats.
// NaN is above or below all others.
inline std::int16_t ordered(std::uint16_t half) {
  const auto bits = static_cast<std::int16_t>(half);
  return static_cast<std::int16_t>(bits ^ (bits >> 15 & 0x7fff));
}
inline std::int32_t ordered(float number) {
  std::uint32_t bits;
  std::memcpy(&bits, &number, 4);
  return static_cast<std::int32_t>(bits ^ ((bits & 0x80000000u) ? 0x7fffffffu : 0u));
}
inline float converted(float score, const float*) { return score; }
inline std::uint16_t converted(float score, const std::uint16_t*) { return to_bf16(score); }

// ids [num_rows, k]: the positions of the k largest in each row of scores [num_rows, count], best first, ties to the lower
// position; -1 in the last places if fewer than k are above -inf. Row i ends at stops[i], if there are stops. NaN is ignored.
template <class T>
void top_rows(const T* scores, std::int64_t num_rows, std::int64_t count, const std::int64_t* stops, std::int64_t k,
              int num_threads, std::int32_t* ids) {
  constexpr std::int64_t strip = 64;
  std::vector<Best> best_of_thread(static_cast<std::size_t>(std::max(num_threads, 1)));
  parallel_for(num_rows, num_threads, [&](std::int64_t row, int thread) {
    Best& best = best_of_thread[static_cast<std::size_t>(thread)];
    best.reset(k);
    const T* at = scores + row * count;
    const std::int64_t stop = stops ? std::clamp<std::int64_t>(stops[row], 0, count) : count;
    auto least = ordered(converted(best.threshold(), at));
    for (std::int64_t start = 0; start < stop; start += strip) {
      const std::int64_t end = std::min(start + strip, stop);
      auto largest = ordered(at[start]);
      for (std::int64_t i = start + 1; i < end; ++i) largest = std::max(largest, ordered(at[i]));
      if (largest <= least) continue;  // true of most strips of a long row
      for (std::int64_t i = start; i < end; ++i) {
        const float score = load(at + i);
        if (score > best.threshold()) best.offer(score, static_cast<std::uint32_t>(i));
      }
      least = ordered(converted(best.threshold(), at));
    }
    const std::vector<Scored>& sorted = best.sorted();
    std::int32_t* to = ids + row * k;
    const auto size = static_cast<std::int64_t>(sorted.size());
    for (std::int64_t i = 0; i < k; ++i) to[i] = i < size ? static_cast<std::int32_t>(sorted[std::size_t(i)].id()) : -1;
  });
}

}  // namespace kvsift
