// Head norms and rotary embedding of one token's queries and keys, in place.
#pragma once

#include "product.hpp"

namespace kvsift {

// Rotates heads [num_heads, width]; cos and sin [width], both halves alike.
template <class T>
void rotate(T* heads, int num_heads, int width, const T* cos, const T* sin, const T* norm, float eps) {
  std::vector<float> row(width);
  for (int h = 0; h < num_heads; ++h, heads += width) {
    if (norm != nullptr)
      rms_norm(heads, norm, width, eps, row.data());
    else
      for (int i = 0; i < width; ++i) row[i] = load(heads + i);
    const int half = width / 2;
    for (int i = 0; i < half; ++i) {  // products are rounded before their sum, as torch rounds them
      const float a = row[i], b = row[half + i];
      store(heads + i, rounded<T>(a * load(cos + i)) - rounded<T>(b * load(sin + i)));
      store(heads + half + i, rounded<T>(b * load(cos + half + i)) + rounded<T>(a * load(sin + half + i)));
    }
  }
}

}  // namespace kvsift
