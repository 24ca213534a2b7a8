// A few rows times a weight matrix, with what comes before and after in a decoder: the weights are read once, at the speed
// of memory, and nothing else is worth a call of its own.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "heads.hpp"
#include "numbers.hpp"
#include "parallel.hpp"

namespace kvsift {

// out[i] = weight[i] * x[i] / rms(x), rounded to T as Llama's norm rounds
template <class T>
void rms_norm(const T* x, const T* weight, int width, float eps, float* out) {
  double squares = 0;
  for (int i = 0; i < width; ++i) squares += double(load(x + i)) * load(x + i);
  const float scale = 1.0f / std::sqrt(float(squares / width) + eps);
  for (int i = 0; i < width; ++i) out[i] = rounded<T>(load(weight + i) * rounded<T>(load(x + i) * scale));
}

template <class T>
struct Product {
  const T* x;         // [num_rows, num_in]
  const T* weight;    // [num_out, num_in]
  const T* norm;      // [num_in], of an RMS norm of x before; or nullptr
  const T* residual;  // [num_rows, num_out], added; or nullptr
  T* out;             // [num_rows, num_out]; gated: [num_rows, num_out / 2], silu of the first half times the second
  std::int64_t num_out;
  int num_rows, num_in;
  float eps;
  bool gated;
};

template <class T>
void multiply(const Product<T>& of, int threads) {
  std::vector<float> x(std::size_t(of.num_rows) * of.num_in), products(std::size_t(of.num_rows) * of.num_out);
  for (int row = 0; row < of.num_rows; ++row) {
    const T* from = of.x + std::int64_t(row) * of.num_in;
    float* to = x.data() + std::int64_t(row) * of.num_in;
    if (of.norm != nullptr)
      rms_norm(from, of.norm, of.num_in, of.eps, to);
    else
      for (int i = 0; i < of.num_in; ++i) to[i] = load(from + i);
  }
  const PackedQueries packed(x.data(), of.num_rows, of.num_in);
  const HeadRows rows{of.weight, 0, of.num_out, 1, of.num_in, sizeof(T) == 2};
  constexpr std::int64_t kTaskBytes = 1 << 16;
  const std::int64_t of_task = std::max<std::int64_t>(4, kTaskBytes / rows.row_bytes() / 4 * 4);
  parallel_for((of.num_out + of_task - 1) / of_task, threads, [&](std::int64_t task, int) {
    const std::int64_t start = task * of_task, count = std::min(of_task, of.num_out - start);
    kernels().dots(packed.heads(0, of.num_rows), rows.rows(0, start, count), products.data() + start, of.num_out);
  });
  const std::int64_t width = of.gated ? of.num_out / 2 : of.num_out;
  for (int row = 0; row < of.num_rows; ++row) {
    const float* from = products.data() + row * of.num_out;
    T* to = of.out + row * width;
    for (std::int64_t i = 0; i < width; ++i) {
      float number = rounded<T>(from[i]);
      if (of.gated) number = rounded<T>(number / (1.0f + std::exp(-number))) * rounded<T>(from[width + i]);
      if (of.residual != nullptr) number = load(of.residual + row * width + i) + number;
      store(to + i, number);
    }
  }
}

}  // namespace kvsift
