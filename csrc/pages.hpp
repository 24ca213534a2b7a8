// Quest's page scores, an upper bound of a page's logits, and the choice of pages by them (arXiv 2406.10774).
#pragma once

#include <algorithm>

#include "heads.hpp"
#include "parallel.hpp"
#include "top_k.hpp"

namespace kvsift {

// [q+ | q-], whose product with [max | min] is the score. The sign of scale is in the features; page_scores applies |scale|.
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

// Pages in the order of their slots: a score does not depend on the order, and memory is read fastest forwards.
class PageOrder {
 public:
  explicit PageOrder(const HeadRows& rows) : slots_(rows.slots(ids_)) {
    if (slots_.ids == nullptr || std::is_sorted(ids_.begin(), ids_.end())) return;
    const auto [first, last] = std::minmax_element(ids_.begin(), ids_.end());
    const std::int64_t base = *first, width = *last - base + 1;
    if (width > 16 * slots_.count) return;  // pages of a large pool: a sort would cost more than it saves
    std::vector<std::int64_t> page_in(static_cast<std::size_t>(width), -1);
    for (std::int64_t page = 0; page < slots_.count; ++page) page_in[std::size_t(slots_[page] - base)] = page;
    ids_.clear();
    for (std::int64_t i = 0; i < width; ++i)
      if (page_in[std::size_t(i)] >= 0) {
        pages_.push_back(page_in[std::size_t(i)]);
        ids_.push_back(base + i);
      }
    slots_ = width == slots_.count ? Slots{base, width, nullptr} : Slots{0, slots_.count, ids_.data()};
  }

  Slots slots(std::int64_t first, std::int64_t count) const { return slots_.part(first, count); }

  // Moves the scores of all pages to their logical order.
  void restore(float* scores, std::vector<float>& copy) const {
    if (pages_.empty()) return;
    copy.assign(scores, scores + pages_.size());
    for (std::size_t i = 0; i < pages_.size(); ++i) scores[pages_[i]] = copy[i];
  }

 private:
  std::vector<std::int64_t> ids_, pages_;  // pages_: of each score; empty: in order
  Slots slots_;
};

constexpr std::int64_t kScoredPages = 1024;  // of a KV head, by one task

// The scores of the pages of one KV head from start on, kScoredPages or as many as are left; scores as of ordered_scores.
inline void score_some(const PackedQueries& features, int group, const HeadRows& rows, const PageOrder& order, int kv_head,
                       std::int64_t start, float factor, float* scores) {
  const std::int64_t num_pages = rows.length(), count = std::min(kScoredPages, num_pages - start);
  float* out = scores + std::int64_t(kv_head) * group * num_pages + start;
  kernels().dots(features.heads(kv_head * group, group), rows.rows(kv_head, order.slots(start, count)), out, num_pages);
  for (int q = 0; q < group; ++q)
    for (std::int64_t i = 0; i < count; ++i) out[q * num_pages + i] *= factor;
}

// scores [num_query_heads, num_pages], the pages in their order
inline void ordered_scores(const float* queries, int num_query_heads, const HeadRows& rows, const PageOrder& order,
                           float scale, int threads, float* scores) {
  const int group = num_query_heads / rows.num_kv_heads;
  const std::vector<float> features = page_features(queries, num_query_heads, rows.width / 2, scale);
  const PackedQueries packed(features.data(), num_query_heads, rows.width);
  const float factor = scale < 0 ? -scale : scale;
  const std::int64_t parts = (rows.length() + kScoredPages - 1) / kScoredPages;
  parallel_for(parts * rows.num_kv_heads, threads, [&](std::int64_t task, int) {
    score_some(packed, group, rows, order, int(task / parts), task % parts * kScoredPages, factor, scores);
  });
}

// scores [num_query_heads, num_pages]
inline void page_scores(const float* queries, int num_query_heads, const HeadRows& rows, float scale, int threads,
                        float* scores) {
  const PageOrder order(rows);
  ordered_scores(queries, num_query_heads, rows, order, scale, threads, scores);
  std::vector<float> copy;
  for (int q = 0; q < num_query_heads; ++q) order.restore(scores + q * rows.length(), copy);
}

// The k best pages of a selection by the largest score of the query heads that share it, whose scores are overwritten
// [sharing, num_pages]; chosen [k], ascending.
inline void choose_shared(float* scores, int sharing, std::int64_t num_pages, const PageOrder& order, std::int64_t k,
                          std::int64_t* chosen) {
  for (int q = 1; q < sharing; ++q)
    for (std::int64_t i = 0; i < num_pages; ++i) scores[i] = std::max(scores[i], scores[q * num_pages + i]);
  std::vector<float> copy;
  order.restore(scores, copy);
  top_positions(scores, num_pages, k, chosen);
}

// The k best pages of each selection; chosen [num_selections, k].
inline void choose_pages(const float* queries, int num_query_heads, const HeadRows& rows, float scale, std::int64_t k,
                         int num_selections, int threads, std::int64_t* chosen) {
  const std::int64_t num_pages = rows.length();
  const PageOrder order(rows);
  std::vector<float> scores(std::size_t(num_query_heads) * std::size_t(num_pages));
  ordered_scores(queries, num_query_heads, rows, order, scale, threads, scores.data());
  const int sharing = num_query_heads / num_selections;
  parallel_for(num_selections, threads, [&](std::int64_t s, int) {
    choose_shared(scores.data() + s * sharing * num_pages, sharing, num_pages, order, k, chosen + s * k);
  });
}

}  // namespace kvsift
