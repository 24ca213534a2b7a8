// Largest and smallest number of each channel of a page: the summaries by which Quest ranks pages.
#pragma once

#include <vector>

#include "numbers.hpp"

namespace kvsift {

// rows[page] = [max | min] over the valid tokens of keys [num_pages, page_size, width]; valid nullptr: all tokens. NaN stays
// NaN. At least one token of each page must be valid.
template <class T>
void page_extremes(const T* keys, const bool* valid, std::int64_t num_pages, int page_size, int width, T* rows) {
  std::vector<float> largest(width), smallest(width);
  for (std::int64_t page = 0; page < num_pages; ++page, rows += 2 * width) {
    bool first = true;
    for (int slot = 0; slot < page_size; ++slot) {
      if (valid != nullptr && !valid[page * page_size + slot]) continue;
      const T* key = keys + (page * page_size + slot) * width;
      for (int i = 0; i < width; ++i) {
        const float x = load(key + i);
        if (first || x > largest[i] || x != x) largest[i] = x;
        if (first || x < smallest[i] || x != x) smallest[i] = x;
      }
      first = false;
    }
    for (int i = 0; i < width; ++i) store(rows + i, largest[i]), store(rows + width + i, smallest[i]);
  }
}

}  // namespace kvsift
