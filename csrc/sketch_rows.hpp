// Sketches of pages, from their keys and values: kernels/sketch.py defines the row and its numbers.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "isa/isa.hpp"
#include "numbers.hpp"
#include "parallel.hpp"
#include "rotation.hpp"

namespace kvsift {

// A whole number between two others, the lower one for NaN.
inline int between(float x, int low, int high) { return x > float(low) ? (x < float(high) ? int(x) : high) : low; }

// Writes rows of pages of one head.
class SketchWriter {
 public:
  explicit SketchWriter(const SketchFormat& format)
      : format_(format), rotation_(format.head_dim), tokens_(std::size_t(format.page_size) * format.head_dim),
        means_(std::size_t(format.head_dim)), squares_(std::size_t(format.page_size)), products_(squares_.size()),
        steps_(squares_.size()), words_(2 * squares_.size()), there_(squares_.size()) {}

  // valid nullptr: all tokens; what an invalid one holds is not read.
  template <class T>
  void write(const T* keys, const T* values, const bool* valid, std::uint8_t* row) {
    std::fill(row, row + format_.width, std::uint8_t(0));
    count_ = 0;
    for (int t = 0; t < format_.page_size; ++t) count_ += there_[std::size_t(t)] = valid == nullptr || valid[t];
    gather(values);
    write_mean(format_.value_mean, format_.scales + 2, row);
    gather(keys);
    rotation_.turn(tokens_.data(), format_.page_size);
    write_mean(format_.key_mean, format_.scales, row);
    subtract_mean();
    for (int word = 0; word < format_.words; ++word) write_word(word, row);
    for (int t = 0; t < format_.page_size; ++t) write_factor(t, row);
  }

 private:
  // tokens_ [head_dim, page_size], zeros where there is none
  template <class T>
  void gather(const T* vectors) {
    const int dim = format_.head_dim, size = format_.page_size;
    for (int t = 0; t < size; ++t)
      for (int i = 0; i < dim; ++i) tokens_[std::size_t(i * size + t)] = there_[std::size_t(t)] ? load(vectors + t * dim + i) : 0.0f;
  }

  // Writes the mean of the tokens in 4 bits per channel, and keeps what was written.
  void write_mean(int at, int scale_at, std::uint8_t* row) {
    const int size = format_.page_size;
    float largest = 0.0f;
    for (std::size_t i = 0; i < means_.size(); ++i) {
      const float* channel = &tokens_[i * std::size_t(size)];
      float sums[4] = {};
      int t = 0;
      for (; t + 4 <= size; t += 4)
        for (int j = 0; j < 4; ++j) sums[j] += channel[t + j];
      for (; t < size; ++t) sums[0] += channel[t];
      means_[i] = (sums[0] + sums[1] + sums[2] + sums[3]) / float(count_);
      largest = std::max(largest, std::fabs(means_[i]));
    }
    const std::uint16_t bits = to_half(std::clamp(largest / 7.0f, 5.9604644775390625e-08f, 65504.0f));
    const float scale = from_half(bits);
    std::memcpy(row + scale_at, &bits, 2);
    for (std::size_t i = 0; i < means_.size(); ++i) {
      const int whole = between(std::nearbyint(means_[i] / scale), -7, 7);
      row[std::size_t(at) + i / 2] |= std::uint8_t((whole + 8) << (i % 2 * 4));
      means_[i] = float(whole) * scale;
    }
  }

  void subtract_mean() {
    const std::size_t size = squares_.size();
    std::fill(squares_.begin(), squares_.end(), 0.0f);
    std::fill(products_.begin(), products_.end(), 0.0f);
    float* __restrict squares = squares_.data();
    for (std::size_t i = 0; i < means_.size(); ++i) {
      float* __restrict channel = &tokens_[i * size];
      const float mean = means_[i];
      for (std::size_t t = 0; t < size; ++t) channel[t] -= mean, squares[t] += channel[t] * channel[t];
    }
    for (std::size_t t = 0; t < size; ++t)
      steps_[t] = 1.0f / std::max(std::sqrt(squares_[t]) / std::sqrt(float(format_.head_dim)), 1e-30f);
  }

  // Codes of 32 channels of all tokens.
  void write_word(int word, std::uint8_t* row) {
    const std::size_t size = squares_.size();
    std::fill(words_.begin(), words_.end(), 0u);
    for (int i = 32 * word; i < std::min(32 * word + 32, format_.head_dim); ++i)
      format_.bits == 1 ? write_bits<1>(i) : write_bits<2>(i);
    for (std::size_t t = 0; t < size; ++t)
      if (!there_[t]) words_[t] = words_[size + t] = 0;
    for (int bit = 0; bit < format_.bits; ++bit)
      std::memcpy(row + 4 * size * std::size_t(bit * format_.words + word), &words_[std::size_t(bit) * size], 4 * size);
  }

  // Codes of one channel of all tokens.
  template <int Bits>
  void write_bits(int channel) {
    const std::size_t size = squares_.size();
    const float* __restrict x = &tokens_[std::size_t(channel) * size];
    const float* __restrict steps = steps_.data();
    float* __restrict products = products_.data();
    std::uint32_t *__restrict lower = words_.data(), *__restrict upper = lower + size;
    const int bit = channel & 31;
    for (std::size_t t = 0; t < size; ++t) {
      const std::uint32_t positive = x[t] >= 0;
      if (Bits == 1) {
        products[t] += std::fabs(x[t]);
        lower[t] |= positive << bit;
      } else {
        const std::uint32_t outer = std::fabs(x[t]) * steps[t] >= 1.0f;
        products[t] += std::fabs(x[t]) * (1.0f + 2.0f * float(int(outer)));
        lower[t] |= (positive ^ outer ^ 1u) << bit;  // index 0 to 3 of -3, -1, 1, 3: outer ones are 0 and 3
        upper[t] |= positive << bit;
      }
    }
  }

  void write_factor(int t, std::uint8_t* row) {
    const float product = products_[std::size_t(t)];
    const bool coded = there_[std::size_t(t)] && product > 0;
    const std::uint16_t factor = coded ? to_half(squares_[std::size_t(t)] / product) : std::uint16_t(0);
    std::memcpy(row + format_.factors + 2 * t, &factor, 2);
  }

  SketchFormat format_;
  Rotation rotation_;
  std::vector<float> tokens_, means_;                 // [head_dim, page_size], [head_dim]
  std::vector<float> squares_, products_, steps_;     // of the tokens
  std::vector<std::uint32_t> words_;                  // [bit, page_size]
  std::vector<std::uint8_t> there_;
  int count_ = 0;
};

struct Pages {
  int num_heads;
  std::int64_t num_pages;
  std::int64_t key_stride, value_stride;  // numbers from head to head
  const bool* valid;                      // [num_pages, page_size], or nullptr: all
};

// keys, values [num_heads, num_pages, page_size, head_dim] -> rows [num_heads, num_pages, width]
template <class T>
void sketch_rows(const SketchFormat& format, const T* keys, const T* values, const Pages& pages, int threads, std::uint8_t* rows) {
  constexpr std::int64_t kPages = 64;
  const std::int64_t parts = (pages.num_pages + kPages - 1) / kPages, size = std::int64_t(format.page_size) * format.head_dim;
  parallel_for(parts * pages.num_heads, threads, [&](std::int64_t task, int) {
    SketchWriter writer(format);
    const std::int64_t head = task / parts, first = task % parts * kPages;
    for (std::int64_t page = first; page < std::min(first + kPages, pages.num_pages); ++page)
      writer.write(keys + head * pages.key_stride + page * size, values + head * pages.value_stride + page * size,
                   pages.valid == nullptr ? nullptr : pages.valid + page * format.page_size,
                   rows + (head * pages.num_pages + page) * format.width);
  });
}

}  // namespace kvsift
