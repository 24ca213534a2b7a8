// Queries in the form in which the kernels of sketches read them.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "aligned.hpp"
#include "isa/isa.hpp"

namespace kvsift {

constexpr int kSketchQueries = 4;  // of a call of a kernel, at most

// Queries of one KV head: nibble tables of 6 bits, numbers of 16 and 8 bits for the mean keys, and what turns them into
// logarithms.
class SketchGroup {
 public:
  // queries [group, head_dim], scaled and rotated
  void set(const float* queries, int group, const SketchFormat& format) {
    words_ = format.words, group_ = group;
    tables_.resize(std::size_t(group) * 8 * words_ * 16);
    numbers_.assign(std::size_t(group) * numbers_per_query(), 0);
    bytes_.assign(numbers_.size(), 0);
    factors_.assign(std::size_t((group + kSketchQueries - 1) / kSketchQueries), {});
    std::vector<float> padded(std::size_t(32 * words_), 0.0f);
    for (int q = 0; q < group; ++q) {
      std::copy_n(queries + q * format.head_dim, format.head_dim, padded.begin());
      const float step = fill_tables(padded.data(), q);
      set_factors(padded.data(), q, step, format.bits);
    }
  }

  // Up to four of them.
  SketchQueries chunk(int first) const {
    const std::size_t q = std::size_t(first);
    const int count = std::min(kSketchQueries, group_ - first);
    const std::size_t at = q * numbers_per_query();
    return {&tables_[q * 8 * words_ * 16], &numbers_[at], &bytes_[at], &factors_[q / kSketchQueries], count};
  }

 private:
  std::size_t numbers_per_query() const { return 2 * std::size_t(SketchQueries::half(words_)); }

  // Tables of a query, interleaved with those of its chunk -> the number that a step of their values stands for.
  float fill_tables(const float* query, int q) {
    const int in_chunk = q % kSketchQueries, count = std::min(kSketchQueries, group_ - (q - in_chunk));
    std::uint8_t* out = &tables_[std::size_t(q - in_chunk) * 8 * words_ * 16];
    float widest = 0;
    for (int n = 0; n < 8 * words_; ++n, query += 4)
      widest = std::max(widest, std::fabs(query[0]) + std::fabs(query[1]) + std::fabs(query[2]) + std::fabs(query[3]));
    query -= 32 * words_;
    const float factor = widest > 0 ? 63 / widest : 0;
    for (int n = 0; n < 8 * words_; ++n, query += 4) {
      float least = 0.5f, channels[4];  // sums above the least, rounded
      for (int i = 0; i < 4; ++i) channels[i] = query[i] * factor, least += channels[i] < 0 ? -channels[i] : 0.0f;
      std::uint8_t* const table = out + 16 * SketchQueries::table(n, in_chunk, count);
      for (int code = 0; code < 16; ++code) {  // all at once
        float sum = least;
        for (int i = 0; i < 4; ++i) sum += float(code >> i & 1) * channels[i];
        table[code] = std::uint8_t(int(sum < 0 ? 0 : sum));  // a rounded sum may be a little below 0
      }
    }
    return widest / 63;
  }

  // With B the sum of table values, product with the code = 2 * step * B - (2^bits - 1) * sum |q|.
  void set_factors(const float* query, int q, float step, int bits) {
    constexpr float kLog2E = 1.44269504f;
    const int width = 32 * words_;
    float size = 0, squares = 0, largest = 0;
    for (int i = 0; i < width; ++i) {
      size += std::fabs(query[i]);
      squares += query[i] * query[i];
      largest = std::max(largest, std::fabs(query[i]));
    }
    const float variance = squares * (bits == 1 ? 0.363380228f : 0.4126f);  // ERROR of kernels/sketch.py
    const float whole = largest > 0 ? 32767 / largest : 0, byte = largest > 0 ? 127 / largest : 0;
    for (int i = 0; i < width; ++i) {
      const float half = query[i] < 0 ? -0.5f : 0.5f;
      const std::size_t at = std::size_t(q) * numbers_per_query() + std::size_t(i % 2 * SketchQueries::half(words_) + i / 2);
      numbers_[at] = std::int16_t(query[i] * whole + half);
      bytes_[at] = std::int8_t(query[i] * byte + half);
    }
    SketchFactors& factors = factors_[std::size_t(q / kSketchQueries)];
    factors.sum[q % kSketchQueries] = kLog2E * 2 * step;
    factors.offset[q % kSketchQueries] = -kLog2E * float((1 << bits) - 1) * size;
    factors.variance[q % kSketchQueries] = kLog2E * variance / 2;
    factors.mean[q % kSketchQueries] = kLog2E * largest / 32767;
  }

  int words_ = 0, group_ = 0;
  Aligned<std::uint8_t> tables_;  // of each chunk: [words, 2, count, 4, 16]
  Aligned<std::int16_t> numbers_;
  Aligned<std::int8_t> bytes_;
  std::vector<SketchFactors> factors_;  // of each chunk
};

}  // namespace kvsift
