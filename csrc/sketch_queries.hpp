// Queries in the form in which the kernels of sketches read them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "isa/isa.hpp"

namespace kvsift {

constexpr int kSketchQueries = 4;  // of a call of a kernel, at most
constexpr float kLog2E = 1.44269504f;

// Number of 16 bits, IEEE.
inline float from_float16(const std::uint8_t* at) {
  std::uint16_t half;
  std::memcpy(&half, at, 2);
  const int exponent = half >> 10 & 31, fraction = half & 1023;
  if (exponent == 31) return fraction == 0 ? (half & 0x8000 ? -INFINITY : INFINITY) : NAN;
  const float size = exponent == 0 ? std::ldexp(float(fraction), -24) : std::ldexp(float(fraction + 1024), exponent - 25);
  return half & 0x8000 ? -size : size;
}

// All queries of a call: nibble tables of 6 bits, 16-bit numbers for the mean keys, and what turns both into logarithms.
class SketchQueriesOf {
 public:
  // queries [num_query_heads, head_dim], scaled and rotated
  SketchQueriesOf(const float* queries, int num_query_heads, int num_kv_heads, const SketchFormat& format)
      : words_(format.words), group_(num_query_heads / num_kv_heads) {
    tables_.resize(std::size_t(num_query_heads) * 8 * words_ * 16);
    numbers_.resize(std::size_t(num_query_heads) * 32 * words_);
    factors_.resize(std::size_t(num_query_heads));
    std::vector<float> padded(std::size_t(32 * words_), 0.0f);
    for (int h = 0; h < num_query_heads; ++h) {
      std::copy_n(queries + std::int64_t(h) * format.head_dim, format.head_dim, padded.begin());
      const float step = fill_tables(padded.data(), h);
      set_factors(padded.data(), h, step, format.bits);
    }
  }

  // Up to four queries of a KV head, from one of its group on.
  SketchQueries chunk(int kv_head, int first) const {
    const std::size_t head = std::size_t(kv_head * group_ + first);
    return {&tables_[head * 8 * words_ * 16], &numbers_[head * 32 * words_], &factors_[head],
            std::min(kSketchQueries, group_ - first)};
  }

 private:
  // Tables of a query, interleaved with those of its chunk -> the number that a step of their values stands for.
  float fill_tables(const float* query, int head) {
    const int in_group = head % group_, in_chunk = in_group % kSketchQueries;
    const int count = std::min(kSketchQueries, group_ - (in_group - in_chunk));
    std::uint8_t* out = &tables_[std::size_t(head - in_chunk) * 8 * words_ * 16];
    float widest = 0;
    for (int n = 0; n < 8 * words_; ++n) {
      float width = 0;
      for (int i = 0; i < 4; ++i) width += std::fabs(query[4 * n + i]);
      widest = std::max(widest, width);
    }
    const float factor = widest > 0 ? 63 / widest : 0;
    for (int n = 0; n < 8 * words_; ++n)
      for (int code = 0; code < 16; ++code) {
        float sum = 0;  // above that of the code with the least sum
        for (int i = 0; i < 4; ++i) {
          const float q = query[4 * n + i];
          sum += (code >> i & 1) == (q > 0) ? std::fabs(q) : 0.0f;
        }
        out[(n * count + in_chunk) * 16 + code] = std::uint8_t(sum * factor + 0.5f);
      }
    return widest / 63;
  }

  // With B the sum of table values, product with the code = 2 * step * B - (2^bits - 1) * sum |q|.
  void set_factors(const float* query, int head, float step, int bits) {
    const int width = 32 * words_;
    float size = 0, squares = 0, largest = 0;
    for (int i = 0; i < width; ++i) {
      size += std::fabs(query[i]);
      squares += query[i] * query[i];
      largest = std::max(largest, std::fabs(query[i]));
    }
    const float variance = squares * (bits == 1 ? 0.363380228f : 0.4126f);  // ERROR of kernels/sketch.py
    const float whole = largest > 0 ? 32767 / largest : 0;
    for (int i = 0; i < width; ++i)
      numbers_[std::size_t(head) * width + i] = std::int16_t(std::lrint(query[i] * whole));
    factors_[std::size_t(head)] = {kLog2E * 2 * step, -kLog2E * float((1 << bits) - 1) * size, kLog2E * variance / 2,
                                   kLog2E * largest / 32767};
  }

  int words_, group_;
  std::vector<std::uint8_t> tables_;  // of each chunk: [8 * words, count, 16]
  std::vector<std::int16_t> numbers_;
  std::vector<SketchFactors> factors_;
};

}  // namespace kvsift
