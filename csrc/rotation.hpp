// An orthogonal matrix that spreads every channel over all (native/sketch_format.py): sketches are of rotated keys, and so are
// coded rows.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "isa/isa.hpp"

namespace kvsift {

// Rotates several vectors in place, [head_dim, count]: signs, a Hadamard matrix of `size` in each block, a cosine transform
// across the blocks. What is next to each other is of different vectors, so that every step is of whole registers.
class Rotation {
 public:
  explicit Rotation(int head_dim) : size_(head_dim & -head_dim), blocks_(head_dim / size_) {
    for (int i = 0; i < head_dim; ++i) signs_.push_back((std::uint64_t(i) * 0x9e3779b1u >> 15 & 1) != 0 ? -1.0f : 1.0f);
    for (int b = 0; b < blocks_; ++b)
      for (int f = 0; f < blocks_; ++f) {
        const double norm = std::sqrt((f == 0 ? 1.0 : 2.0) / blocks_);
        cosines_.push_back(float(norm * std::cos(3.14159265358979323846 / blocks_ * (b + 0.5) * f)));
      }
  }

  void turn(float* x, int count) const {
    const int dim = size_ * blocks_;
    const float scale = 1.0f / std::sqrt(float(size_));
    for (int i = 0; i < dim; ++i)
      for (int t = 0; t < count; ++t) x[i * count + t] *= signs_[std::size_t(i)] * scale;
    for (int b = 0; b < blocks_; ++b) hadamard(x + b * size_ * count, count);
    if (blocks_ > 1) mix(x, size_ * count, false);
  }

  // The inverse.
  void turn_back(float* x, int count) const {
    const int dim = size_ * blocks_;
    const float scale = 1.0f / std::sqrt(float(size_));
    if (blocks_ > 1) mix(x, size_ * count, true);
    for (int b = 0; b < blocks_; ++b) hadamard(x + b * size_ * count, count);
    for (int i = 0; i < dim; ++i)
      for (int t = 0; t < count; ++t) x[i * count + t] *= signs_[std::size_t(i)] * scale;
  }

  // As turn and turn_back, of vectors that are rows [count, head_dim]; what becomes of one does not depend on the others.
  void turn_rows(float* rows, int count, bool back = false) const {
    const int dim = size_ * blocks_;
    float columns[kColumns * kMaxHeadDim];
    for (int first = 0; first < count; first += kColumns, rows += kColumns * dim) {
      const int some = std::min(kColumns, count - first);
      for (int t = 0; t < some; ++t)
        for (int i = 0; i < dim; ++i) columns[i * some + t] = rows[t * dim + i];
      back ? turn_back(columns, some) : turn(columns, some);
      for (int t = 0; t < some; ++t)
        for (int i = 0; i < dim; ++i) rows[t * dim + i] = columns[i * some + t];
    }
  }

 private:
  static constexpr int kColumns = 16;

  void hadamard(float* x, int count) const {
    for (int half = count; half < size_ * count; half *= 2)
      for (int first = 0; first < size_ * count; first += 2 * half) {
        float *__restrict a = x + first, *__restrict b = a + half;
        for (int i = 0; i < half; ++i) {
          const float sum = a[i] + b[i];
          b[i] = a[i] - b[i], a[i] = sum;
        }
      }
  }

  void mix(float* x, int length, bool back) const {
    const std::vector<float> old(x, x + length * blocks_);
    std::fill(x, x + length * blocks_, 0.0f);
    for (int b = 0; b < blocks_; ++b)
      for (int f = 0; f < blocks_; ++f) {
        const float cosine = cosines_[std::size_t(back ? f * blocks_ + b : b * blocks_ + f)];
        for (int i = 0; i < length; ++i) x[f * length + i] += old[std::size_t(b * length + i)] * cosine;
      }
  }

  int size_, blocks_;
  std::vector<float> signs_, cosines_;
};

}  // namespace kvsift
