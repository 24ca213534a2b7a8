// Sketches of pages, from their keys and values: kernels/sketch.py defines the row and its numbers.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "isa/isa.hpp"
#include "numbers.hpp"

namespace kvsift {

// Rotates vectors in place: signs, a Hadamard matrix of `size` in each block, a cosine transform across the blocks.
class Rotation {
 public:
  explicit Rotation(int head_dim) : head_dim_(head_dim), size_(head_dim & -head_dim), blocks_(head_dim / size_) {
    for (int i = 0; i < head_dim; ++i) signs_.push_back((std::uint64_t(i) * 0x9e3779b1u >> 15 & 1) != 0 ? -1.0f : 1.0f);
    for (int b = 0; b < blocks_; ++b)
      for (int f = 0; f < blocks_; ++f) {
        const double norm = std::sqrt((f == 0 ? 1.0 : 2.0) / blocks_);
        cosines_.push_back(float(norm * std::cos(3.14159265358979323846 / blocks_ * (b + 0.5) * f)));
      }
  }

  void turn(float* x) const {
    const float scale = 1.0f / std::sqrt(float(size_));
    for (int i = 0; i < head_dim_; ++i) x[i] *= signs_[std::size_t(i)] * scale;
    for (int b = 0; b < blocks_; ++b) hadamard(x + b * size_);
    if (blocks_ > 1) mix(x);
  }

 private:
  void hadamard(float* x) const {
    for (int half = 1; half < size_; half *= 2)
      for (int first = 0; first < size_; first += 2 * half)
        for (int i = first; i < first + half; ++i) {
          const float a = x[i], b = x[i + half];
          x[i] = a + b, x[i + half] = a - b;
        }
  }

  void mix(float* x) const {
    const std::vector<float> old(x, x + head_dim_);
    std::fill(x, x + head_dim_, 0.0f);
    for (int b = 0; b < blocks_; ++b)
      for (int f = 0; f < blocks_; ++f)
        for (int i = 0; i < size_; ++i) x[f * size_ + i] += old[std::size_t(b * size_ + i)] * cosines_[std::size_t(b * blocks_ + f)];
  }

  int head_dim_, size_, blocks_;
  std::vector<float> signs_, cosines_;
};

// A whole number between two others, the lower one for NaN.
inline int between(float x, int low, int high) { return x > float(low) ? (x < float(high) ? int(x) : high) : low; }

// Writes rows of pages of one head.
class SketchWriter {
 public:
  explicit SketchWriter(const SketchFormat& format)
      : format_(format), rotation_(format.head_dim), tokens_(std::size_t(format.page_size) * format.head_dim),
        mean_(std::size_t(format.head_dim)) {}

  // valid nullptr: all tokens; what an invalid one holds is not read.
  template <class T>
  void write(const T* keys, const T* values, const bool* valid, std::uint8_t* row) {
    std::fill(row, row + format_.width, std::uint8_t(0));
    mean(values, valid);
    write_mean(format_.value_mean, format_.scales + 2, row);
    load_rotated(keys, valid);
    write_mean(format_.key_mean, format_.scales, row);  // mean_ is then the one that was written
    for (int t = 0; t < format_.page_size; ++t)
      if (valid == nullptr || valid[t]) write_token(t, row);
  }

 private:
  template <class T>
  void mean(const T* vectors, const bool* valid) {
    const int dim = format_.head_dim;
    std::fill(mean_.begin(), mean_.end(), 0.0f);
    int count = 0;
    for (int t = 0; t < format_.page_size; ++t) {
      if (valid != nullptr && !valid[t]) continue;
      ++count;
      for (int i = 0; i < dim; ++i) mean_[std::size_t(i)] += load(vectors + t * dim + i);
    }
    for (float& x : mean_) x /= float(count);
  }

  template <class T>
  void load_rotated(const T* keys, const bool* valid) {
    const int dim = format_.head_dim;
    for (int t = 0; t < format_.page_size; ++t) {
      if (valid != nullptr && !valid[t]) continue;
      float* token = &tokens_[std::size_t(t) * dim];
      for (int i = 0; i < dim; ++i) token[i] = load(keys + t * dim + i);
      rotation_.turn(token);
    }
    mean(tokens_.data(), valid);
  }

  // Writes the mean in 8 bits, and puts what was written in its place.
  void write_mean(int at, int scale_at, std::uint8_t* row) {
    float largest = 0.0f;
    for (const float x : mean_) largest = std::max(largest, std::fabs(x));
    const std::uint16_t bits = to_half(std::clamp(largest / 127.0f, 5.9604644775390625e-08f, 65504.0f));
    const float scale = from_half(bits);
    std::memcpy(row + scale_at, &bits, 2);
    for (int i = 0; i < format_.head_dim; ++i) {
      const int code = between(std::nearbyint(mean_[std::size_t(i)] / scale), -127, 127);
      row[at + i] = std::uint8_t(code);
      mean_[std::size_t(i)] = float(code) * scale;
    }
  }

  void write_token(int t, std::uint8_t* row) {
    const int dim = format_.head_dim, most = (1 << format_.bits) - 1;
    float* x = &tokens_[std::size_t(t) * dim];
    float square = 0.0f, product = 0.0f;
    for (int i = 0; i < dim; ++i) x[i] -= mean_[std::size_t(i)], square += x[i] * x[i];
    const float step = std::max(std::sqrt(square) / std::sqrt(float(dim)), 1e-30f);
    for (int i = 0; i < dim; ++i) {
      const int index = format_.bits == 1 ? int(x[i] >= 0) : between(std::floor(x[i] / step), -(most + 1) / 2, most / 2) + (most + 1) / 2;
      product += x[i] * float(2 * index - most);
      for (int bit = 0; bit < format_.bits; ++bit)
        row[4 * ((bit * format_.words + i / 32) * format_.page_size + t) + i % 32 / 8] |= std::uint8_t((index >> bit & 1) << i % 8);
    }
    const std::uint16_t factor = product > 0 ? to_half(square / product) : std::uint16_t(0);
    std::memcpy(row + format_.factors + 2 * t, &factor, 2);
  }

  SketchFormat format_;
  Rotation rotation_;
  std::vector<float> tokens_, mean_;
};

}  // namespace kvsift
