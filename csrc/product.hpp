// A few rows times a weight matrix, with the norm before and the residual or gate after it: one call per matrix, which reads
// the weights once, at the speed of memory.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "heads.hpp"
#include "numbers.hpp"
#include "parallel.hpp"

namespace kvsift {

// Of an RMS norm.
struct Norm {
  const void* weight = nullptr;  // nullptr: there is no norm
  float eps = 0.0f;
  float offset = 0.0f;  // added to the weight; the product is then rounded once, as Gemma's, else as Llama's
};

// out[i] = (weight[i] + offset) * x[i] / rms(x), rounded to T
template <class T>
void rms_norm(const T* x, const Norm& norm, int width, float* out) {
  const T* const weight = static_cast<const T*>(norm.weight);
  double squares = 0;
  for (int i = 0; i < width; ++i) squares += double(load(x + i)) * load(x + i);
  const float scale = 1.0f / std::sqrt(float(squares / width) + norm.eps);
  if (norm.offset != 0.0f)
    for (int i = 0; i < width; ++i) out[i] = rounded<T>(load(x + i) * scale * (load(weight + i) + norm.offset));
  else
    for (int i = 0; i < width; ++i) out[i] = rounded<T>(load(weight + i) * rounded<T>(load(x + i) * scale));
}

// A row after its norm, added to a residual if there is one; normal: room for width numbers. out may be the residual.
template <class T>
void add_normalised(const T* x, const Norm& norm, int width, const T* residual, float* normal, T* out) {
  rms_norm(x, norm, width, normal);
  for (int i = 0; i < width; ++i) store(out + i, residual == nullptr ? normal[i] : load(residual + i) + normal[i]);
}

template <class T>
struct Product {
  const T* x;         // [num_rows, num_in]
  const T* weight;    // [num_out, num_in]; nullptr: packed (packed.hpp)
  Norm norm;          // of x
  const T* bias;      // [num_out]; or nullptr
  const T* residual;  // [num_rows, num_out], added; or nullptr
  T* out;             // [num_rows, num_out]; gated: [num_rows, num_out / 2], act of the first half times the second
  std::int64_t num_out;
  int num_rows, num_in;
  bool gated;
  bool gelu;  // act is GELU by tanh; else silu
};

// A row of x in float32, after the norm if there is one.
template <class T>
void read_input(const Product<T>& call, int row, float* to) {
  const T* from = call.x + std::int64_t(row) * call.num_in;
  if (call.norm.weight != nullptr)
    rms_norm(from, call.norm, call.num_in, to);
  else
    for (int i = 0; i < call.num_in; ++i) to[i] = load(from + i);
}

template <class T>
std::vector<float> inputs(const Product<T>& call) {
  std::vector<float> x(std::size_t(call.num_rows) * call.num_in);
  for (int row = 0; row < call.num_rows; ++row) read_input(call, row, x.data() + std::int64_t(row) * call.num_in);
  return x;
}

// Outputs [first, first + count) of all rows, from their products [num_rows, count] in rows stride numbers apart; gated:
// from those of the second half, factors, too.
template <class T>
void write_outputs(const Product<T>& call, std::int64_t first, std::int64_t count, const float* products, const float* factors,
                   std::int64_t stride) {
  const std::int64_t width = call.gated ? call.num_out / 2 : call.num_out;
  const Outputs to{call.bias, call.residual, call.out, width, sizeof(T) == 2, call.gelu};
  kernels().finish(to, call.num_rows, first, count, products, call.gated ? factors : nullptr, stride);
}

// Rows of the weight matrix that one task multiplies with.
template <class T>
std::int64_t rows_per_task(int num_in) {
  constexpr std::int64_t kTaskBytes = 1 << 16;
  return std::max<std::int64_t>(4, kTaskBytes / (num_in * std::int64_t(sizeof(T))) / 4 * 4);
}

template <class T>
void multiply(const Product<T>& call, int threads) {
  const PackedQueries packed(inputs(call).data(), call.num_rows, call.num_in);
  std::vector<float> products(std::size_t(call.num_rows) * call.num_out);
  const std::int64_t per_task = rows_per_task<T>(call.num_in);
  parallel_for((call.num_out + per_task - 1) / per_task, threads, [&](std::int64_t task, int) {
    const std::int64_t start = task * per_task, count = std::min(per_task, call.num_out - start);
    const Rows rows{call.weight + start * call.num_in, nullptr, count, call.num_in, plain(sizeof(T) == 2)};
    kernels().dots(packed.heads(0, call.num_rows), rows, products.data() + start, call.num_out);
  });
  const std::int64_t width = call.gated ? call.num_out / 2 : call.num_out;
  write_outputs(call, 0, width, products.data(), products.data() + width, call.num_out);
}

}  // namespace kvsift
