// A decode step's choice of tokens by sketches (methods/sketch.py), and an estimate of attention over the others.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "aligned.hpp"
#include "heads.hpp"
#include "numbers.hpp"
#include "parallel.hpp"
#include "sketch_queries.hpp"
#include "sketch_rows.hpp"
#include "top_many.hpp"

namespace kvsift {

// Number of 16 bits, IEEE.
inline float from_float16(const std::uint8_t* at) {
  std::uint16_t half;
  std::memcpy(&half, at, 2);
  const std::uint32_t exponent = half >> 10 & 31, fraction = half & 1023;
  const std::uint32_t bits = exponent == 31 ? 0x7f800000u | fraction << 13 : (exponent + 112) << 23 | fraction << 13;
  float size;
  std::memcpy(&size, &bits, 4);
  if (exponent == 0) size = float(fraction) * 5.9604644775390625e-8f;  // 2^-24
  return half & 0x8000 ? -size : size;
}

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
  const PackedQueries& queries;  // of head_dim numbers
  float scale;                   // of logits
  const Rotation& rotation;
  int num_query_heads;
  SketchRows rows;
  std::int64_t first, count;  // candidates, tokens of the rows
  std::int64_t k;             // at most count
  int num_selections;         // num_kv_heads or num_query_heads
  const float* past;          // [num_query_heads], lse of the exact logits of what is visible anyway; -inf: nothing is
  std::int64_t* ids;          // [num_selections, k], candidates from 0 on
  float* output;              // [num_query_heads, head_dim]
  float* lse;                 // [num_query_heads]

  int group() const { return num_query_heads / rows.num_kv_heads; }
};

// Candidates of one KV head. The steps: weigh each block, vote, choose, estimate the rest. Weights are powers of 2: of logarithms
// less a reference of each query.
class SketchHead {
 public:
  void start(const SketchCall& call, const Slots& slots, int kv_head) {
    call_ = &call, kv_head_ = kv_head;
    const SketchFormat& format = call.rows.format;
    queries_.set(turned_queries(), call.group(), format);
    num_pages_ = slots.count;
    pages_per_block_ = kSketchTokens / format.page_size;
    num_blocks_ = (num_pages_ + pages_per_block_ - 1) / pages_per_block_;
    stride_ = (num_pages_ * format.page_size + 31) / 32 * 32;
    const std::uint8_t* base = call.rows.data + kv_head * call.rows.head_stride;
    pages_.resize(std::size_t(num_pages_ + kRestPages + 4));
    for (std::int64_t i = 0; i < num_pages_; ++i) pages_[std::size_t(i)] = base + slots[i] * format.width;
    std::fill(pages_.begin() + num_pages_, pages_.end(), pages_[std::size_t(num_pages_ - 1)]);
    for (std::int64_t i = 0; i < std::min(num_pages_, pages_per_block_); ++i)  // later blocks are fetched before they are weighed
      for (int at = 0; at < format.value_mean; at += 64) __builtin_prefetch(pages_[std::size_t(i)] + at, 0, 2);
    const std::size_t group = std::size_t(call.group());
    weights_.resize(group * std::size_t(stride_));
    sums_.resize(group * std::size_t(num_blocks_));
    value_scales_.resize(std::size_t(num_pages_ + kRestPages));
    refer_to_largest(std::min(num_pages_, kFirstPages));
  }

  // Neighbouring blocks, of which a thread fetches one while it weighs the one before.
  static constexpr std::int64_t kBlocksPerTask = 2;
  static std::int64_t num_tasks(std::int64_t num_pages, const SketchFormat& format) {
    const std::int64_t pages = kBlocksPerTask * (kSketchTokens / format.page_size);
    return (num_pages + pages - 1) / pages;
  }
  void weigh_some(std::int64_t task) {
    for (std::int64_t i = task * kBlocksPerTask; i < std::min((task + 1) * kBlocksPerTask, num_blocks_); ++i) weigh(i);
  }

  // Weights of a block of pages, and their sums.
  void weigh(std::int64_t block) {
    const std::int64_t page = block * pages_per_block_;
    const SketchBlock candidates = block_of(page, pages_in(block));
    for (int q = 0; q < call_->group(); q += kSketchQueries) {
      float sums[kSketchQueries];
      const SketchQueries chunk = queries_.chunk(q);
      kernels().sketch_weights(chunk, call_->rows.format, candidates,
                               {weights(q) + page * call_->rows.format.page_size, stride_, &references_[std::size_t(q)], sums,
                                &value_scales_[std::size_t(page)]});
      for (int i = 0; i < chunk.count; ++i) sums_[std::size_t((q + i) * num_blocks_ + block)] = sums[i];
    }
    drop_outside(page, candidates);
  }

  // The best candidates of each selection of this head.
  void choose() {
    if (!weights_fit()) {  // seldom
      refer_to_largest(num_pages_);
      for (std::int64_t block = 0; block < num_blocks_; ++block) weigh(block);
    }
    const int sharing = call_->num_query_heads / call_->num_selections;
    const int page_size = call_->rows.format.page_size;
    votes_.resize(std::size_t(stride_));
    for (int q = 0; q < call_->group(); q += sharing) {
      factors_.resize(std::size_t(sharing));
      for (int i = 0; i < sharing; ++i) factors_[std::size_t(i)] = vote_factor(q + i);
      kernels().sketch_votes(weights(q), stride_, factors_.data(), sharing, num_pages_ * page_size, votes_.data());
      best_.positions(votes_.data() + call_->first, call_->count, call_->k, chosen(q));
    }
  }

  // Attention over what was not chosen, by pages.
  void estimate_rest() {
    const SketchFormat& format = call_->rows.format;
    const int stride = padded(format.head_dim), sharing = call_->num_query_heads / call_->num_selections;
    for (int q = 0; q < call_->group(); q += sharing) drop(q, sharing, chosen(q));
    for (int q = 0; q < call_->group(); q += kSketchQueries) {
      const int count = std::min(kSketchQueries, call_->group() - q);
      values_.assign(std::size_t(count * stride), 0.0f);
      float sums[kSketchQueries] = {};
      for (std::int64_t page = 0; page < num_pages_; page += kRestPages)
        kernels().sketch_rest(format, &pages_[std::size_t(page)], int(std::min<std::int64_t>(kRestPages, num_pages_ - page)), count,
                              {weights(q) + page * format.page_size, stride_, &value_scales_[std::size_t(page)], sums,
                               values_.data(), stride});
      for (int i = 0; i < count; ++i) finish(q + i, sums[i], values_.data() + i * stride);
    }
  }

 private:
  static constexpr std::int64_t kFirstPages = 4;  // whose largest weights are the first references
  static constexpr float kMostVotes = 58;         // powers of 2 that a vote may have
  static constexpr float kLeastSum = 0x1p-30f, kMostSum = 0x1p90f;  // of a query's weights

  int pages_in(std::int64_t block) const {
    return int(std::min(pages_per_block_, num_pages_ - block * pages_per_block_));
  }
  // Of `count` pages from one on.
  SketchBlock block_of(std::int64_t page, int count) const {
    const std::int64_t size = call_->rows.format.page_size, token = page * size;
    return {&pages_[std::size_t(page)], count, int(std::max<std::int64_t>(call_->first - token, 0)),
            int(std::min(call_->first + call_->count - token, count * size))};
  }

  // Makes the largest logarithm of each query in the first pages, a whole number, its reference.
  void refer_to_largest(std::int64_t num_pages) {
    const std::int64_t per_call = pages_per_block_;
    references_.assign(std::size_t(call_->group()), -std::numeric_limits<float>::infinity());
    for (int q = 0; q < call_->group(); q += kSketchQueries) {
      const SketchQueries chunk = queries_.chunk(q);
      for (std::int64_t page = 0; page < num_pages; page += per_call) {
        float maxima[kSketchQueries];
        kernels().sketch_maxima(chunk, call_->rows.format, block_of(page, int(std::min(per_call, num_pages - page))), maxima);
        for (int i = 0; i < chunk.count; ++i)
          references_[std::size_t(q + i)] = std::max(references_[std::size_t(q + i)], maxima[i]);
      }
    }
    for (float& reference : references_) reference = std::nearbyint(std::clamp(reference, -4e6f, 4e6f));
  }

  float weight_sum(int q) const {
    const auto from = sums_.begin() + std::ptrdiff_t(q * num_blocks_);
    return std::accumulate(from, from + std::ptrdiff_t(num_blocks_), 0.0f);
  }
  // Whether the weights of all queries are far from the least and the largest number.
  bool weights_fit() const {
    for (int q = 0; q < call_->group(); ++q) {
      const float sum = weight_sum(q);
      if (!(sum > kLeastSum && sum < kMostSum)) return false;
    }
    return true;
  }

  // Queries of this head, scaled and rotated, [group, head_dim].
  const float* turned_queries() {
    const int width = call_->rows.format.head_dim, group = call_->group();
    columns_.resize(std::size_t(width * group));
    turned_.resize(columns_.size());
    for (int q = 0; q < group; ++q) {
      const float* query = call_->queries.heads(kv_head_ * group + q, 1).numbers;
      for (int i = 0; i < width; ++i) columns_[std::size_t(i * group + q)] = query[i] * call_->scale;
    }
    call_->rotation.turn(columns_.data(), group);
    for (int q = 0; q < group; ++q)
      for (int i = 0; i < width; ++i) turned_[std::size_t(q * width + i)] = columns_[std::size_t(i * group + q)];
    return turned_.data();
  }

  std::int64_t* chosen(int q) const {
    return call_->ids + std::int64_t(kv_head_ * call_->group() + q) * call_->num_selections / call_->num_query_heads * call_->k;
  }
  std::uint16_t* weights(int q) { return weights_.data() + q * stride_; }
  std::uint16_t& weight(int q, std::int64_t token) { return weights(q)[token / 16 * 16 + weight_position(int(token % 16))]; }

  // Drops the weights of tokens of a block's pages that are no candidates: at either end.
  void drop_outside(std::int64_t page, const SketchBlock& block) {
    const int page_size = call_->rows.format.page_size;
    const std::int64_t start = page * page_size, stop = start + block.stop, end = start + block.num_pages * page_size;
    for (int q = 0; q < call_->group(); ++q) {
      for (std::int64_t token = start; token < start + block.first; ++token) weight(q, token) = 0;
      for (std::int64_t token = stop; token < end; ++token) weight(q, token) = 0;
    }
  }

  // What makes votes of a query's weights: they are compared with what is visible anyway. Votes of weights that are far above
  // that would leave float32: these are compared with their sum.
  float vote_factor(int q) const {
    const float given = call_->past[kv_head_ * call_->group() + q], reference = references_[std::size_t(q)];
    const float past = given == -std::numeric_limits<float>::infinity() ? 0.0f : given * 1.44269504f;
    return std::exp2(reference - std::max(past, reference + std::log2(weight_sum(q)) - kMostVotes));
  }

  // Drops the weights that queries from q on have for chosen candidates.
  void drop(int q, int sharing, const std::int64_t* ids) {
    std::uint16_t* const own = weights(q);
    const std::int64_t stride = stride_, first = call_->first, k = call_->k;  // in registers: weights may be any of it
    for (std::int64_t i = 0; i < k; ++i) {
      const std::int64_t token = first + ids[i], at = token / 16 * 16 + weight_position(int(token % 16));
      for (int j = 0; j < sharing; ++j) own[j * stride + at] = 0;
    }
  }

  void finish(int q, float sum, const float* values) {
    const int head_dim = call_->rows.format.head_dim, head = kv_head_ * call_->group() + q;
    // The values of a rest that weighs almost nothing are 0 by now (whole_weights).
    const float factor = sum > 1e-37f ? 1 / sum : 0.0f;
    for (int i = 0; i < head_dim; ++i) call_->output[std::int64_t(head) * head_dim + i] = values[i] * factor;
    call_->lse[head] = (references_[std::size_t(q)] + std::log2(sum)) * 0.693147181f;
  }

  const SketchCall* call_ = nullptr;
  SketchGroup queries_;
  int kv_head_ = 0;
  std::int64_t num_pages_ = 0, pages_per_block_ = 0, num_blocks_ = 0, stride_ = 0;
  std::vector<const std::uint8_t*> pages_;
  Aligned<std::uint16_t> weights_;   // bf16 [group, tokens], strips in order of weight_position
  std::vector<float> references_;    // [group], logarithms to the base of 2
  std::vector<float> sums_;          // [group, num_blocks], of weights
  std::vector<float> value_scales_;  // [num_pages], and any numbers
  Aligned<float> votes_;             // [tokens]
  std::vector<float> factors_, values_, columns_, turned_;
  TopOfMany best_;
};

// Chooses for one KV head, in memory that its thread keeps: its rows and weights stay in the thread's cache.
inline void choose_of_head(const SketchCall& call, const Slots& slots, int kv_head, bool rest) {
  thread_local SketchHead head;
  head.start(call, slots, kv_head);
  for (std::int64_t task = 0; task < SketchHead::num_tasks(slots.count, call.rows.format); ++task) head.weigh_some(task);
  head.choose();
  if (rest) head.estimate_rest();
}

// Nothing depends on the number of threads: with no more threads than heads, each takes whole heads; else all take blocks.
inline void choose_sketched(const SketchCall& call, int threads) {
  const int num_heads = call.rows.num_kv_heads;
  std::vector<std::int64_t> ids;
  const Slots slots = call.rows.table.range(0, call.rows.num_pages(), ids);
  if (threads <= num_heads)
    return parallel_for(num_heads, threads, [&](std::int64_t h, int) { choose_of_head(call, slots, int(h), true); });
  std::vector<SketchHead> heads(static_cast<std::size_t>(num_heads));
  for (int h = 0; h < num_heads; ++h) heads[std::size_t(h)].start(call, slots, h);
  const std::int64_t num_tasks = SketchHead::num_tasks(slots.count, call.rows.format);
  parallel_for(num_heads * num_tasks, threads,
               [&](std::int64_t task, int) { heads[std::size_t(task / num_tasks)].weigh_some(task % num_tasks); });
  parallel_for(num_heads, threads, [&](std::int64_t h, int) {
    heads[std::size_t(h)].choose();
    heads[std::size_t(h)].estimate_rest();
  });
}

}  // namespace kvsift
