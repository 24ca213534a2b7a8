// Rows of 8-bit codes, RowType::coded: number = scale * code, with scale = max |number| / 127. Keys are rotated first, which
// spreads channels that are larger than the others over all; queries of coded keys are rotated alike.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "numbers.hpp"
#include "parallel.hpp"
#include "rotation.hpp"

namespace kvsift {

inline void encode_row(const float* numbers, int width, std::int8_t* row) {
  float most = 0.0f, not_finite = 0.0f;
  for (int i = 0; i < width; ++i) most = std::max(most, std::fabs(numbers[i])), not_finite += numbers[i] - numbers[i];
  const float scale = most / 127.0f + not_finite, step = std::max(scale, std::numeric_limits<float>::min());
  const bool finite = std::isfinite(scale);  // else the scale makes NaN of every number
  for (int i = 0; i < width; ++i) row[i] = finite ? std::int8_t(std::nearbyint(numbers[i] / step)) : std::int8_t(1);
  std::memcpy(row + width, &scale, sizeof scale);
}

inline void decode_row(const std::int8_t* row, int width, float* numbers) {
  float scale;
  std::memcpy(&scale, row + width, sizeof scale);
  for (int i = 0; i < width; ++i) numbers[i] = float(row[i]) * scale;
}

// Encodes vectors [count, width]; rotation nullptr: as they are.
template <class T>
void encode_rows(const T* vectors, std::int64_t count, int width, const Rotation* rotation, std::int8_t* rows) {
  std::vector<float> numbers(std::size_t(count) * width);
  for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = load(vectors + i);
  if (rotation != nullptr) rotation->turn_rows(numbers.data(), int(count));
  for (std::int64_t r = 0; r < count; ++r) encode_row(&numbers[std::size_t(r * width)], width, rows + r * row_bytes(RowType::coded, width));
}

// The inverse, up to rounding.
template <class T>
void decode_rows(const std::int8_t* rows, std::int64_t count, int width, const Rotation* rotation, T* vectors) {
  std::vector<float> numbers(std::size_t(count) * width);
  for (std::int64_t r = 0; r < count; ++r) decode_row(rows + r * row_bytes(RowType::coded, width), width, &numbers[std::size_t(r * width)]);
  if (rotation != nullptr) rotation->turn_rows(numbers.data(), int(count), true);
  for (std::size_t i = 0; i < numbers.size(); ++i) store(vectors + i, numbers[i]);
}

}  // namespace kvsift
