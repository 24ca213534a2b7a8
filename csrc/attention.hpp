// Attention of one token over host memory, dense or over named units and spans, split into tasks and merged exactly.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "heads.hpp"
#include "parallel.hpp"

namespace kvsift {

constexpr int kQueriesTogether = 4;

// Tokens that the query heads [first, first + count) of one KV head see in one task.
struct Piece {
  int kv_head;
  int first_query;
  int num_queries;
  std::int64_t start;          // of the tokens, or in ids
  std::int64_t count;
  const std::int64_t* ids;     // nullptr: consecutive tokens
};

struct Attended {
  float* output;  // [num_query_heads, width]
  float* lse;     // [num_query_heads]
};

// Attends all pieces and merges those of each query head, in their order: the answer does not depend on the threads.
inline void attend_pieces(const PackedQueries& queries, int num_query_heads, const HeadRows& keys, const HeadRows& values,
                          const std::vector<Piece>& pieces, float scale, float softcap, bool coarse, int threads,
                          const Attended& out) {
  const Kernels& level = kernels();
  const int stride = queries.stride();
  std::vector<std::size_t> first(pieces.size() + 1, 0);  // slot of a piece's first query head
  for (std::size_t p = 0; p < pieces.size(); ++p) first[p + 1] = first[p] + std::size_t(pieces[p].num_queries);
  const std::size_t slots = first.back();
  std::vector<float> maxima(slots, -std::numeric_limits<float>::infinity()), sums(slots, 0.0f);
  std::vector<float> outputs(slots * stride, 0.0f);

  parallel_for(std::int64_t(pieces.size()), threads, [&](std::int64_t p, int) {
    const Piece& piece = pieces[std::size_t(p)];
    Rows rows = piece.ids == nullptr ? keys.rows(piece.kv_head, piece.start, piece.count)
                                     : keys.named(piece.kv_head, piece.ids + piece.start, piece.count);
    const void* value = piece.ids == nullptr ? values.rows(piece.kv_head, piece.start, 0).base : values.head(piece.kv_head);
    for (int q = 0; q < piece.num_queries; q += kQueriesTogether) {
      const std::size_t slot = first[std::size_t(p)] + std::size_t(q);
      level.attend(queries.heads(piece.first_query + q, std::min(kQueriesTogether, piece.num_queries - q)), rows, value,
                   scale, softcap, coarse, {&maxima[slot], &sums[slot], &outputs[slot * stride]});
    }
  });

  std::vector<std::vector<std::size_t>> slots_of(num_query_heads);
  for (std::size_t p = 0; p < pieces.size(); ++p)
    for (int q = 0; q < pieces[p].num_queries; ++q)
      slots_of[std::size_t(pieces[p].first_query + q)].push_back(first[p] + std::size_t(q));
  for (int h = 0; h < num_query_heads; ++h) {
    float maximum = -std::numeric_limits<float>::infinity();
    for (std::size_t slot : slots_of[std::size_t(h)]) maximum = std::max(maximum, maxima[slot]);
    float* output = out.output + std::size_t(h) * keys.width;
    std::fill(output, output + keys.width, 0.0f);
    out.lse[h] = maximum;
    if (maximum == -std::numeric_limits<float>::infinity()) continue;  // nothing was seen: output 0, lse -inf
    float total = 0.0f;
    for (std::size_t slot : slots_of[std::size_t(h)]) total += sums[slot] * std::exp(maxima[slot] - maximum);
    for (std::size_t slot : slots_of[std::size_t(h)]) {
      const float weight = std::exp(maxima[slot] - maximum) / total;
      for (int i = 0; i < keys.width; ++i) output[i] += weight * outputs[slot * stride + std::size_t(i)];
    }
    out.lse[h] = maximum + std::log(total);
  }
}

// Tokens per piece: enough pieces for many threads, none too small to be worth a task. Never by the number of threads.
inline std::int64_t piece_length(std::int64_t tokens_of_all_heads) {
  const std::int64_t even = (tokens_of_all_heads / 64 + 255) / 256 * 256;
  return std::clamp<std::int64_t>(even, 512, 8192);
}

inline void cut(std::vector<Piece>& pieces, Piece whole, std::int64_t length) {
  const std::int64_t stop = whole.start + whole.count;
  for (std::int64_t start = whole.start; start < stop; start += length) {
    Piece piece = whole;
    piece.start = start;
    piece.count = std::min(length, stop - start);
    pieces.push_back(piece);
  }
}

inline void attend_dense(const PackedQueries& queries, int num_query_heads, const HeadRows& keys, const HeadRows& values,
                         float scale, float softcap, bool coarse, int threads, const Attended& out) {
  const int group = num_query_heads / keys.num_kv_heads;
  const std::int64_t length = piece_length(keys.length * keys.num_kv_heads);
  std::vector<Piece> pieces;
  for (int h = 0; h < keys.num_kv_heads; ++h) cut(pieces, {h, h * group, group, 0, keys.length, nullptr}, length);
  attend_pieces(queries, num_query_heads, keys, values, pieces, scale, softcap, coarse, threads, out);
}

// Unit ids [num_lists, capacity], -1 where there is none.
struct Units {
  const std::int64_t* ids;
  int num_lists;  // 1, num_kv_heads or num_query_heads
  std::int64_t capacity;
  std::int64_t unit_size;
};

inline void attend_units(const PackedQueries& queries, int num_query_heads, const HeadRows& keys, const HeadRows& values,
                         const Units& units, const std::vector<std::pair<std::int64_t, std::int64_t>>& spans, float scale,
                         float softcap, bool coarse, int threads, const Attended& out) {
  const int group = num_query_heads / keys.num_kv_heads;
  std::vector<std::vector<std::int64_t>> tokens(std::size_t(units.num_lists));
  for (int list = 0; list < units.num_lists; ++list) {
    auto& ids = tokens[std::size_t(list)];
    ids.reserve(std::size_t(units.capacity * units.unit_size));
    for (std::int64_t i = 0; i < units.capacity; ++i) {
      const std::int64_t unit = units.ids[list * units.capacity + i];
      if (unit < 0 || unit > keys.length / units.unit_size) continue;
      const std::int64_t start = unit * units.unit_size;
      const std::int64_t stop = std::min(start + units.unit_size, keys.length);
      for (std::int64_t token = start; token < stop; ++token) ids.push_back(token);
    }
  }
  std::vector<Piece> pieces;
  constexpr std::int64_t kLength = 1024;
  for (int h = 0; h < keys.num_kv_heads; ++h) {
    for (const auto& span : spans) {
      const std::int64_t start = std::max<std::int64_t>(span.first, 0), stop = std::min(span.second, keys.length);
      if (start < stop) cut(pieces, {h, h * group, group, start, stop - start, nullptr}, kLength);
    }
    if (units.num_lists == num_query_heads && group > 1) {
      for (int q = h * group; q < (h + 1) * group; ++q) {
        const auto& ids = tokens[std::size_t(q)];
        cut(pieces, {h, q, 1, 0, std::int64_t(ids.size()), ids.data()}, kLength);
      }
    } else {
      const auto& ids = tokens[units.num_lists == 1 ? 0 : std::size_t(h)];
      cut(pieces, {h, h * group, group, 0, std::int64_t(ids.size()), ids.data()}, kLength);
    }
  }
  attend_pieces(queries, num_query_heads, keys, values, pieces, scale, softcap, coarse, threads, out);
}

}  // namespace kvsift
