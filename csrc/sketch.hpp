// A decode step's choice of tokens by sketches (methods/sketch.py), and an estimate of attention over the others.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "heads.hpp"
#include "numbers.hpp"
#include "parallel.hpp"
#include "sketch_queries.hpp"
#include "top_many.hpp"

namespace kvsift {

// Rows [num_kv_heads, num_pages, format.width] of one sequence in a pool; its heads are head_stride bytes apart.
struct SketchRows {
  const std::uint8_t* data;
  std::int64_t head_stride;
  const SlotTable& table;
  int num_kv_heads;
  SketchFormat format;

  std::int64_t num_pages() const { return table.length(); }
};

struct SketchCall {
  const float* queries;  // [num_query_heads, head_dim], scaled and rotated
  int num_query_heads;
  const SketchRows& rows;
  std::int64_t first, count;  // candidates, tokens of the rows
  std::int64_t k;             // at most count
  int num_selections;         // num_kv_heads or num_query_heads
  std::int64_t* ids;          // [num_selections, k], candidates from 0 on
  float* output;              // [num_query_heads, head_dim]
  float* lse;                 // [num_query_heads]

  int group() const { return num_query_heads / rows.num_kv_heads; }
};

// Candidates of one KV head. The steps: weigh each block, vote, choose, estimate the rest.
class SketchHead {
 public:
  void start(const SketchCall& call, const SketchQueriesOf& queries, const Slots& slots, int kv_head) {
    call_ = &call, queries_ = &queries, kv_head_ = kv_head;
    const SketchFormat& format = call.rows.format;
    num_pages_ = slots.count;
    pages_per_block_ = kSketchTokens / format.page_size;
    num_blocks_ = (num_pages_ + pages_per_block_ - 1) / pages_per_block_;
    stride_ = num_pages_ * format.page_size;
    const std::uint8_t* base = call.rows.data + kv_head * call.rows.head_stride;
    pages_.resize(std::size_t(num_pages_ + kSketchPages + 2));
    for (std::int64_t i = 0; i < std::int64_t(pages_.size()); ++i)
      pages_[std::size_t(i)] = base + slots[std::min(i, num_pages_ - 1)] * format.width;
    const std::size_t group = std::size_t(call.group());
    weights_.resize(group * std::size_t(stride_));
    page_sums_.resize(group * std::size_t(num_pages_));
    maxima_.resize(group * std::size_t(num_blocks_));
    totals_.resize(group);
  }

  std::int64_t num_blocks() const { return num_blocks_; }

  // Weights of a block of pages relative to the largest of each query, and their sums.
  void weigh(std::int64_t block) {
    const SketchFormat& format = call_->rows.format;
    const std::int64_t page = block * pages_per_block_, token = page * format.page_size;
    const std::int64_t stop = std::min<std::int64_t>(call_->first + call_->count - token, pages_in(block) * format.page_size);
    const int first = int(std::max<std::int64_t>(call_->first - token, 0));
    for (int q = 0; q < call_->group(); q += kSketchQueries) {
      const SketchQueries chunk = queries_->chunk(kv_head_, q);
      float maxima[kSketchQueries];
      kernels().sketch_weights(chunk, format, {&pages_[std::size_t(page)], pages_in(block), first, int(stop)},
                               {weights(q) + token, stride_, page_sums(q) + page, num_pages_, maxima});
      for (int i = 0; i < chunk.count; ++i) maximum(q + i, block) = maxima[i];
    }
    drop_outside(page, first, page * format.page_size + stop);
  }

  // The best candidates of each selection of this head.
  void choose() {
    for (int q = 0; q < call_->group(); ++q) totals_[std::size_t(q)] = log_sum(q);
    const int sharing = call_->num_query_heads / call_->num_selections;
    votes_.resize(std::size_t(stride_));
    for (int q = 0; q < call_->group(); q += sharing) {
      vote(q, sharing);
      std::int64_t* ids = call_->ids + (kv_head_ * call_->group() + q) / sharing * call_->k;
      best_.positions(votes_.data() + call_->first, call_->count, call_->k, ids);
      for (int i = q; i < q + sharing; ++i) drop(i, ids);
    }
  }

  // Attention over what was not chosen, by pages.
  void estimate_rest() {
    const int head_dim = call_->rows.format.head_dim, stride = padded(head_dim);
    for (int q = 0; q < call_->group(); q += kSketchQueries) {
      const int count = std::min(kSketchQueries, call_->group() - q);
      sums_.assign(std::size_t(count * stride), 0.0f);
      float references[kSketchQueries];
      for (int i = 0; i < count; ++i) references[i] = largest(q + i);
      for (std::int64_t block = 0; block < num_blocks_; ++block) add_values(block, q, count, references);
      for (int i = 0; i < count; ++i) finish(q + i, sums_.data() + i * stride);
    }
  }

 private:
  int pages_in(std::int64_t block) const {
    return int(std::min(pages_per_block_, num_pages_ - block * pages_per_block_));
  }
  std::uint16_t* weights(int q) { return weights_.data() + q * stride_; }
  float* page_sums(int q) { return page_sums_.data() + q * num_pages_; }
  float& maximum(int q, std::int64_t block) { return maxima_[std::size_t(q * num_blocks_ + block)]; }
  float largest(int q) const {
    const auto from = maxima_.begin() + std::ptrdiff_t(q * num_blocks_);
    return *std::max_element(from, from + std::ptrdiff_t(num_blocks_));
  }
  // How much a block's weights count beside those of the block of the largest one.
  float block_factor(int q, std::int64_t block, float reference) { return std::exp2(maximum(q, block) - reference); }

  // Sum of the weights of all candidates, and its logarithm to the base of 2.
  float log_sum(int q) {
    const float reference = largest(q);
    float total = 0;
    for (std::int64_t block = 0; block < num_blocks_; ++block) {
      const float* from = page_sums(q) + block * pages_per_block_;
      float sum = 0;
      for (int i = 0; i < pages_in(block); ++i) sum += from[i];
      total += sum * block_factor(q, block, reference);
    }
    return reference + std::log2(total);
  }

  // Drops the weights of tokens of [page, ..] that are no candidates: at either end, up to the pages that they share.
  void drop_outside(std::int64_t page, int first, std::int64_t stop) {
    const int page_size = call_->rows.format.page_size;
    const std::int64_t start = page * page_size, end = (stop + page_size - 1) / page_size * page_size;
    if (first == 0 && stop == end) return;
    for (int q = 0; q < call_->group(); ++q) {
      std::fill(weights(q) + start, weights(q) + start + first, std::uint16_t{0});
      std::fill(weights(q) + stop, weights(q) + end, std::uint16_t{0});
      sum_page(q, start / page_size);
      sum_page(q, (stop - 1) / page_size);
    }
  }

  void sum_page(int q, std::int64_t page) {
    const int page_size = call_->rows.format.page_size;
    const std::uint16_t* from = weights(q) + page * page_size;
    float sum = 0;
    for (int i = 0; i < page_size; ++i) sum += from_bf16(from[i]);
    page_sums(q)[page] = sum;
  }

  void vote(int q, int sharing) {
    const int page_size = call_->rows.format.page_size;
    factors_.resize(std::size_t(sharing));
    for (std::int64_t block = 0; block < num_blocks_; ++block) {
      const std::int64_t token = block * pages_per_block_ * page_size;
      for (int i = 0; i < sharing; ++i) factors_[std::size_t(i)] = block_factor(q + i, block, totals_[std::size_t(q + i)]);
      kernels().sketch_votes(weights(q) + token, stride_, factors_.data(), sharing, pages_in(block) * page_size,
                             votes_.data() + token);
    }
  }

  // Drops the weights of chosen candidates, ascending.
  void drop(int q, const std::int64_t* ids) {
    const int page_size = call_->rows.format.page_size;
    for (std::int64_t i = 0; i < call_->k;) {
      const std::int64_t page = (call_->first + ids[i]) / page_size;
      for (; i < call_->k && (call_->first + ids[i]) / page_size == page; ++i) weights(q)[call_->first + ids[i]] = 0;
      sum_page(q, page);
    }
  }

  // Adds the mean values of a block's pages, with weights of 15 bits.
  void add_values(std::int64_t block, int q, int count, const float* references) {
    const SketchFormat& format = call_->rows.format;
    const std::int64_t page = block * pages_per_block_;
    const int num_pages = pages_in(block);
    const std::uint8_t* const* rows = &pages_[std::size_t(page)];
    float value_scales[kSketchPages], scales[kSketchQueries];
    for (int i = 0; i < num_pages; ++i) value_scales[i] = from_float16(rows[i] + format.scales + 2);
    alignas(64) std::int16_t weights[kSketchQueries * kSketchPages] = {};
    bool any = false;
    for (int i = 0; i < count; ++i) {
      const float factor = block_factor(q + i, block, references[i]);
      scales[i] = factor * to_whole(page_sums(q + i) + page, value_scales, num_pages, weights + i * kSketchPages);
      any = any || scales[i] > 0;
    }
    if (any) kernels().sketch_values(format, rows, num_pages, weights, scales, count, sums_.data(), padded(format.head_dim));
  }

  // whole[i] = sums[i] * scales[i] / the result, at most 32767
  static float to_whole(const float* sums, const float* scales, int count, std::int16_t* whole) {
    float products[kSketchPages], largest = 0;
    for (int i = 0; i < count; ++i) {
      products[i] = sums[i] * scales[i];
      largest = products[i] > largest ? products[i] : largest;
    }
    if (!(largest > 1e-30f)) return 0;
    const float factor = 32767 / largest;
    for (int i = 0; i < count; ++i) whole[i] = products[i] > 0 ? std::int16_t(products[i] * factor + 0.5f) : std::int16_t{0};
    return largest / 32767;
  }

  void finish(int q, const float* sums) {
    const int head_dim = call_->rows.format.head_dim, head = kv_head_ * call_->group() + q;
    const float log_total = log_sum(q);
    const bool any = log_total > -std::numeric_limits<float>::infinity();
    const float factor = any ? std::exp2(largest(q) - log_total) : 0.0f;
    for (int i = 0; i < head_dim; ++i) call_->output[std::int64_t(head) * head_dim + i] = sums[i] * factor;
    call_->lse[head] = log_total * 0.693147181f;
  }

  const SketchCall* call_ = nullptr;
  const SketchQueriesOf* queries_ = nullptr;
  int kv_head_ = 0;
  std::int64_t num_pages_ = 0, pages_per_block_ = 0, num_blocks_ = 0, stride_ = 0;
  std::vector<const std::uint8_t*> pages_;
  std::vector<std::uint16_t> weights_;  // bf16 [group, tokens]
  std::vector<float> page_sums_;        // [group, num_pages]
  std::vector<float> maxima_;           // [group, num_blocks], of the weights' logarithms
  std::vector<float> totals_;           // [group], logarithms of the sums of weights
  std::vector<float> votes_, factors_, sums_;
  TopOfMany best_;
};

// Nothing depends on the number of threads: with fewer threads than heads, each takes a head from start to end, whose rows
// and weights then stay in its cache; else all threads take blocks.
inline void choose_sketched(const SketchCall& call, int threads) {
  const int num_heads = call.rows.num_kv_heads;
  const SketchQueriesOf queries(call.queries, call.num_query_heads, num_heads, call.rows.format);
  std::vector<std::int64_t> ids;
  const Slots slots = call.rows.table.range(0, call.rows.num_pages(), ids);
  if (threads <= num_heads) {
    parallel_for(num_heads, threads, [&](std::int64_t h, int) {
      thread_local SketchHead head;  // keeps its memory: a step has as many calls as layers
      head.start(call, queries, slots, int(h));
      for (std::int64_t block = 0; block < head.num_blocks(); ++block) head.weigh(block);
      head.choose();
      head.estimate_rest();
    });
    return;
  }
  std::vector<SketchHead> heads(static_cast<std::size_t>(num_heads));
  for (int h = 0; h < num_heads; ++h) heads[std::size_t(h)].start(call, queries, slots, h);
  const std::int64_t num_blocks = heads[0].num_blocks();
  parallel_for(num_heads * num_blocks, threads,
               [&](std::int64_t task, int) { heads[std::size_t(task / num_blocks)].weigh(task % num_blocks); });
  parallel_for(num_heads, threads, [&](std::int64_t h, int) {
    heads[std::size_t(h)].choose();
    heads[std::size_t(h)].estimate_rest();
  });
}

}  // namespace kvsift
