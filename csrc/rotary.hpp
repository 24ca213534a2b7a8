// Head norms and rotary embedding of one token's queries and keys, in place.
#pragma once

#include "product.hpp"

namespace kvsift {

// Rotates the first numbers of heads [num_heads, width]; cos and sin [rotated], both halves alike. Whole heads are multiplied
// by the scale.
template <class T>
void rotate(T* heads, int num_heads, int width, int rotated, const T* cos, const T* sin, const Norm& norm, float scale = 1.0f) {
  std::vector<float> row(width);
  for (int h = 0; h < num_heads; ++h, heads += width) {
    if (norm.weight != nullptr)
      rms_norm(heads, norm, width, row.data());
    else
      for (int i = 0; i < width; ++i) row[i] = load(heads + i);
    const int half = rotated / 2;
    for (int i = 0; i < half; ++i) {  // products are rounded before their sum, as torch rounds them
      const float a = row[i], b = row[half + i];
      store(heads + i, rounded<T>(a * load(cos + i)) - rounded<T>(b * load(sin + i)));
      store(heads + half + i, rounded<T>(b * load(cos + half + i)) + rounded<T>(a * load(sin + half + i)));
    }
    for (int i = rotated; i < width; ++i) store(heads + i, row[i]);
    if (scale != 1.0f)
      for (int i = 0; i < width; ++i) store(heads + i, load(heads + i) * scale);
  }
}

}  // namespace kvsift
