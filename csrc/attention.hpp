// Attention of one token over host memory, dense or over listed units and spans: cut into tasks and merged exactly.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "heads.hpp"
#include "numbers.hpp"
#include "parallel.hpp"

namespace kvsift {

constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

struct Attended {
  float* output;            // [num_query_heads, width]
  float* lse;               // [num_query_heads]
  float* shares = nullptr;  // [num_kv_heads, num_pages] by page of 16 tokens: the sum over queries of its share; or nullptr
};

struct Attention {
  const PackedQueries& queries;
  int num_query_heads;
  const HeadRows &keys, &values;  // with the same slots
  float scale, softcap;
  bool coarse;  // weights may be rounded to bf16
  int threads;
  Attended out;
  int num_tokens = 1;  // query h * num_tokens + i is of token i, which does not see the num_tokens - 1 - i keys at the end

  int group() const { return num_query_heads / keys.num_kv_heads; }
};

// Tokens that the query heads [first_query, first_query + num_queries) of one KV head attend in one task.
struct Piece {
  int kv_head;
  int first_query;
  int num_queries;
  Slots slots;
  std::int64_t first_token = 0;
};

// Sums of weights of all queries by page of 16 tokens, and the reference of each block of 64.
class PageWeights {
 public:
  PageWeights(int num_queries, std::int64_t num_tokens)
      : stride_((num_tokens + 63) / 64 * 4), sums_(std::size_t(num_queries * stride_)), references_(sums_.size() / 4, kMinusInfinity) {}

  void add_to(Softmax& state, int query, std::int64_t token) {
    state.page_sums = &sums_[std::size_t(query * stride_ + token / 16)];
    state.references = &references_[std::size_t((query * stride_ + token / 16) / 4)];
    state.page_stride = stride_;
  }

  // Adds the shares of a query to those of its KV head.
  void share(int query, float lse, std::int64_t num_pages, float* shares) const {
    for (std::int64_t page = 0; page < num_pages; ++page) {
      const std::int64_t at = query * stride_ + page;
      const float weight = sums_[std::size_t(at)];
      if (weight != 0.0f) shares[page] += weight * std::exp(references_[std::size_t(at / 4)] - lse);
    }
  }

 private:
  std::int64_t stride_;  // pages of a query
  std::vector<float> sums_, references_;
};

// Softmax states of all pieces, one for each query head of a piece.
class PieceStates {
 public:
  PieceStates(const std::vector<Piece>& pieces, int num_query_heads, int stride)
      : stride_(stride), states_(std::size_t(num_query_heads)) {
    for (const Piece& piece : pieces) {
      first_.push_back(maxima_.size());
      for (int q = 0; q < piece.num_queries; ++q) states_[std::size_t(piece.first_query + q)].push_back(first_.back() + std::size_t(q));
      maxima_.resize(maxima_.size() + std::size_t(piece.num_queries), kMinusInfinity);
    }
    sums_.resize(maxima_.size());
    outputs_.resize(maxima_.size() * std::size_t(stride));
  }

  // As before the first row, for a piece of so many queries.
  void clear(std::int64_t piece, int num_queries) {
    const std::size_t at = first_[std::size_t(piece)], count = std::size_t(num_queries);
    std::fill_n(&maxima_[at], count, kMinusInfinity);
    std::fill_n(&sums_[at], count, 0.0f);
    std::fill_n(&outputs_[at * std::size_t(stride_)], count * std::size_t(stride_), 0.0f);
  }

  Softmax state(std::int64_t piece, int query) {
    const std::size_t at = first_[std::size_t(piece)] + std::size_t(query);
    return {&maxima_[at], &sums_[at], &outputs_[at * std::size_t(stride_)]};
  }

  // Merges the states of a query head, in the order of the pieces -> lse.
  float merge(int query_head, int width, float* output) const {
    const std::vector<std::size_t>& states = states_[std::size_t(query_head)];
    std::fill(output, output + width, 0.0f);
    const auto [reference, total] = sum(query_head, states.size());
    if (total == 0.0f) return kMinusInfinity;  // no token: output 0, lse -inf; where all logits are NaN, so is the sum
    for (std::size_t at : states) {
      const float weight = std::exp(maxima_[at] - reference) / total;
      const float* part = &outputs_[at * std::size_t(stride_)];
      for (int i = 0; i < width; ++i) output[i] += weight * part[i];
    }
    return reference + std::log(total);
  }

  // The lse of the first pieces of a query head alone: the bits that merge gives if there are no others.
  float lse(int query_head, std::size_t num_pieces) const {
    const auto [reference, total] = sum(query_head, num_pieces);
    return total == 0.0f ? kMinusInfinity : reference + std::log(total);
  }

 private:
  // Reference, and the sum of exp(logit - reference) over the first pieces of a query head.
  std::pair<float, float> sum(int query_head, std::size_t num_pieces) const {
    const std::size_t* const states = states_[std::size_t(query_head)].data();
    float maximum = kMinusInfinity, total = 0.0f;
    for (std::size_t i = 0; i < num_pieces; ++i) maximum = std::max(maximum, maxima_[states[i]]);
    const float reference = maximum == kMinusInfinity ? 0.0f : maximum;  // -inf - -inf is NaN
    for (std::size_t i = 0; i < num_pieces; ++i) total += sums_[states[i]] * std::exp(maxima_[states[i]] - reference);
    return {reference, total};
  }

  int stride_;
  std::vector<std::size_t> first_;                // of each piece
  std::vector<std::vector<std::size_t>> states_;  // of each query head
  std::vector<float> maxima_, sums_, outputs_;
};

// Merges attention to visible tokens, [width] and its lse, with an estimate of attention to the others, as if these had been
// attended -> the share of the estimate.
template <class T>
float merge_estimate(T* output, float& lse, const float* estimate, float estimate_lse, int width) {
  const float top = std::max(lse, estimate_lse);
  if (top == kMinusInfinity) return 0.0f;
  const float seen = std::exp(lse - top), unseen = std::exp(estimate_lse - top), share = unseen / (seen + unseen);
  for (int i = 0; i < width; ++i) {
    const float own = load(output + i);
    store(output + i, own + share * (estimate[i] - own));
  }
  lse = top + std::log(seen + unseen);
  return share;
}

// Adds piece number p of a call to its states.
inline void attend_piece(const Attention& call, const Piece& piece, std::int64_t p, PieceStates& states, PageWeights* by_page) {
  const Rows keys = call.keys.rows(piece.kv_head, piece.slots);
  const void* values = call.values.rows(piece.kv_head, piece.slots).base;
  const std::int64_t behind = call.keys.length() - piece.first_token - piece.slots.count;  // keys after the piece
  for (int q = 0; q < piece.num_queries; q += kMostAttending) {
    const int first = piece.first_query + q;
    Softmax state = states.state(p, q);
    if (by_page != nullptr) by_page->add_to(state, first, piece.first_token);
    Queries queries = call.queries.heads(first, std::min(kMostAttending, piece.num_queries - q));
    std::int64_t unseen[kMostAttending];
    if (call.num_tokens > 1 && behind < call.num_tokens - 1) {
      for (int i = 0; i < queries.count; ++i)
        unseen[i] = std::max<std::int64_t>(call.num_tokens - 1 - (first + i) % call.num_tokens - behind, 0);
      queries.unseen = unseen;
    }
    kernels().attend(queries, keys, values, call.scale, call.softcap, call.coarse, state);
  }
}

// The result does not depend on the number of threads.
inline void attend_pieces(const Attention& call, const std::vector<Piece>& pieces) {
  const bool shares = call.out.shares != nullptr;
  PageWeights by_page(shares ? call.num_query_heads : 0, call.keys.length());
  PieceStates states(pieces, call.num_query_heads, call.queries.stride());
  parallel_for(std::int64_t(pieces.size()), call.threads, [&](std::int64_t p, int) {
    attend_piece(call, pieces[std::size_t(p)], p, states, shares ? &by_page : nullptr);
  });
  for (int h = 0; h < call.num_query_heads; ++h)
    call.out.lse[h] = states.merge(h, call.keys.width, call.out.output + std::size_t(h) * call.keys.width);
  if (!shares) return;
  const std::int64_t num_pages = (call.keys.length() + 15) / 16;
  parallel_for(call.keys.num_kv_heads, call.threads, [&](std::int64_t head, int) {
    float* out = call.out.shares + head * num_pages;
    std::fill(out, out + num_pages, 0.0f);
    for (int h = int(head) * call.group(); h < (int(head) + 1) * call.group(); ++h) by_page.share(h, call.out.lse[h], num_pages, out);
  });
}

// Tokens per piece: enough pieces for many threads, none too small for a task, and independent of the number of threads.
inline std::int64_t piece_length(std::int64_t tokens_of_all_heads) {
  const std::int64_t even = (tokens_of_all_heads / 64 + 255) / 256 * 256;
  return std::clamp<std::int64_t>(even, 512, 8192);
}

inline void cut(std::vector<Piece>& pieces, const Piece& whole, std::int64_t length) {
  for (std::int64_t first = 0; first < whole.slots.count; first += length) {
    pieces.push_back(whole);
    pieces.back().slots = whole.slots.part(first, std::min(length, whole.slots.count - first));
    pieces.back().first_token += first;
  }
}

// Of consecutive tokens, the last of which sees all keys, in these slots: query h * num_tokens + i is head h of token i, and
// a KV head has so many queries. The keys are read once for all tokens, in the pieces and the order in which each token
// attends them alone: the results are the same.
inline std::vector<Piece> dense_pieces(int num_kv_heads, int queries_of_head, int num_tokens, const Slots& slots) {
  const auto seen = [&](int query) { return slots.count - num_tokens + 1 + query % num_tokens; };
  const auto length = [&](int query) { return piece_length(seen(query) * num_kv_heads); };
  const bool together = length(0) == length(num_tokens - 1);  // the first token is cut as the last is
  std::vector<Piece> pieces;
  for (int h = 0; h < num_kv_heads; ++h) {
    const int first = h * queries_of_head;
    if (together) {
      cut(pieces, {h, first, queries_of_head, slots}, length(0));
      continue;
    }
    for (int q = first; q < first + queries_of_head; ++q) cut(pieces, {h, q, 1, slots.part(0, seen(q))}, length(q));
  }
  return pieces;
}

inline void attend_dense(const Attention& call) {
  std::vector<std::int64_t> ids;
  attend_pieces(call, dense_pieces(call.keys.num_kv_heads, call.group(), call.num_tokens, call.keys.slots(ids)));
}

// Unit ids [num_lists, capacity], -1 for padding.
struct Units {
  const std::int64_t* ids;
  int num_lists;  // 1, num_kv_heads or num_query_heads
  std::int64_t capacity;
  std::int64_t unit_size;
};

using Span = std::pair<std::int64_t, std::int64_t>;  // tokens [first, second)

// Slots of the tokens of each list.
inline std::vector<std::vector<std::int64_t>> slots_of_units(const Units& units, const SlotTable& table) {
  std::vector<std::vector<std::int64_t>> lists(static_cast<std::size_t>(units.num_lists));
  // A list may hold the unit that the next tokens will fill: its tokens end with those of the table, and it may have
  // none. A product with any later unit could overflow.
  const std::int64_t length = table.length(), size = units.unit_size, last = length / size, capacity = units.capacity;
  const std::int64_t* unit = units.ids;
  for (auto& list : lists) {
    list.resize(std::size_t(capacity * size));
    std::int64_t* end = list.data();
    for (std::int64_t i = 0; i < capacity; ++i, ++unit) {
      if (*unit < 0 || *unit > last) continue;
      const std::int64_t start = *unit * size;
      end = table.write(start, std::min(start + size, length), end);
    }
    list.resize(std::size_t(end - list.data()));
  }
  return lists;
}

// Slots of each span, as far as it has tokens; ids is the memory of those that are not consecutive.
inline std::vector<Slots> slots_of_spans(const std::vector<Span>& spans, const SlotTable& table,
                                         std::vector<std::vector<std::int64_t>>& ids) {
  std::vector<Slots> slots;
  ids.resize(spans.size());
  for (const Span& span : spans)
    slots.push_back(table.range(std::max<std::int64_t>(span.first, 0), std::min(span.second, table.length()),
                                ids[slots.size()]));
  return slots;
}

constexpr std::int64_t kUnitTokens = 256;  // of listed units or spans, in a piece: few heads keep several threads busy

inline void attend_units(const Attention& call, const Units& units, const std::vector<Span>& spans) {
  const int group = call.group();
  const std::vector<std::vector<std::int64_t>> lists = slots_of_units(units, call.keys.table);
  std::vector<std::vector<std::int64_t>> ids;
  const std::vector<Slots> always = slots_of_spans(spans, call.keys.table, ids);
  const int per_list = units.num_lists == call.num_query_heads ? 1 : group;  // query heads that share a list
  std::vector<Piece> pieces;
  for (int h = 0; h < call.keys.num_kv_heads; ++h) {
    for (const Slots& span : always) cut(pieces, {h, h * group, group, span}, kUnitTokens);
    for (int q = h * group; q < (h + 1) * group; q += per_list) {
      const auto& list = lists[units.num_lists == 1 ? 0 : std::size_t(q / per_list)];
      cut(pieces, {h, q, per_list, {0, std::int64_t(list.size()), list.data()}}, kUnitTokens);
    }
  }
  attend_pieces(call, pieces);
}

}  // namespace kvsift
