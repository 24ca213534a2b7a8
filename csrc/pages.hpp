// Quest's page scores, an upper bound of a page's logits, and the choice of pages by them (arXiv 2406.10774).
#pragma once

#include "heads.hpp"
#include "parallel.hpp"
#include "top.hpp"

namespace kvsift {

// [q+ | q-] . [max | min] as one product. |scale| is multiplied in afterwards: its sign goes into the features.
inline std::vector<float> page_features(const float* queries, int num_query_heads, int head_dim, float scale) {
  std::vector<float> features(std::size_t(num_query_heads) * head_dim * 2);
  for (int h = 0; h < num_query_heads; ++h)
    for (int i = 0; i < head_dim; ++i) {
      const float q = scale < 0 ? -queries[std::size_t(h) * head_dim + i] : queries[std::size_t(h) * head_dim + i];
      features[(std::size_t(h) * 2) * head_dim + i] = q > 0 ? q : 0.0f;
      features[(std::size_t(h) * 2 + 1) * head_dim + i] = q > 0 ? 0.0f : q;
    }
  return features;
}

// scores [num_query_heads, num_pages]
inline void page_scores(const float* queries, int num_query_heads, const HeadRows& rows, float scale, int threads,
                        float* scores) {
  const int group = num_query_heads / rows.num_kv_heads;
  const std::vector<float> features = page_features(queries, num_query_heads, rows.width / 2, scale);
  const PackedQueries packed(features.data(), num_query_heads, rows.width);
  const float size = scale < 0 ? -scale : scale;
  constexpr std::int64_t kPages = 1024;
  const std::int64_t parts = (rows.length + kPages - 1) / kPages;
  parallel_for(parts * rows.num_kv_heads, threads, [&](std::int64_t task, int) {
    const int h = int(task / parts);
    const std::int64_t start = task % parts * kPages, count = std::min(kPages, rows.length - start);
    float* out = scores + std::int64_t(h) * group * rows.length + start;
    kernels().dots(packed.heads(h * group, group), rows.rows(h, start, count), out, rows.length);
    for (int q = 0; q < group; ++q)
      for (std::int64_t i = 0; i < count; ++i) out[q * rows.length + i] *= size;
  });
}

// Of each selection the k best pages by the largest score of its query heads; chosen [num_selections, k], ascending.
inline void choose_pages(const float* queries, int num_query_heads, const HeadRows& rows, float scale, std::int64_t k,
                         int num_selections, int threads, std::int64_t* chosen) {
  std::vector<float> scores(std::size_t(num_query_heads) * std::size_t(rows.length));
  page_scores(queries, num_query_heads, rows, scale, threads, scores.data());
  const int sharing = num_query_heads / num_selections;
  parallel_for(num_selections, threads, [&](std::int64_t s, int) {
    float* best = scores.data() + s * sharing * rows.length;
    for (int q = 1; q < sharing; ++q)
      for (std::int64_t i = 0; i < rows.length; ++i) best[i] = std::max(best[i], best[q * rows.length + i]);
    top_places(best, rows.length, k, chosen + s * k);
  });
}

}  // namespace kvsift
