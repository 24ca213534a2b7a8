// Best-first search on a graph of fixed degree, and what can be reached in it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#include "graph_rows.hpp"
#include "heads.hpp"

namespace kvsift::graph {

struct Graph {
  const std::uint32_t* neighbours;  // [rows, degree], no_row ends a list
  std::int64_t rows;                // those of the keys that the graph may lead to; what follows is scanned
  int degree;
  const std::uint32_t* entries;
  int num_entries;

  const std::uint32_t* of(std::int64_t row) const { return neighbours + row * degree; }
};

// A key and its score in one number: larger is better, equal scores are ordered by id, lower first. The last bit tells
// whether its neighbours have been looked at; ids are unique, so that it never decides an order.
using Candidate = std::uint64_t;

inline Candidate candidate(float score, std::uint32_t id) {
  score += 0.0f;  // -0 equals 0
  std::uint32_t bits;
  std::memcpy(&bits, &score, sizeof bits);
  bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return static_cast<Candidate>(bits) << 32 | static_cast<Candidate>(0x7fffffffu - id) << 1;
}
inline std::uint32_t id_of(Candidate c) { return 0x7fffffffu - (static_cast<std::uint32_t>(c) >> 1); }
inline float score_of(Candidate c) {
  std::uint32_t bits = static_cast<std::uint32_t>(c >> 32);
  bits = bits & 0x80000000u ? bits & 0x7fffffffu : ~bits;
  float score;
  std::memcpy(&score, &bits, sizeof score);
  return score;
}

constexpr int expansions = 4;  // keys whose neighbours are scored together: fewer rounds, a few more scores

// What one search writes while it runs; reused by the next on the same thread.
class Searcher {
 public:
  void bind(const Rows& keys, ScoreRows score) {
    keys_ = keys, score_ = score;
    blocked_ = keys.dim % 8 == 0 && keys.dim <= kMaxHeadDim;
  }

  // The best `keep` keys that were met on the way, best first, valid until the next call. The walk ends when the best
  // `beam` of them have been expanded.
  const std::vector<Candidate>& walk(const Graph& graph, const float* query, int beam, int keep) {
    scanned_ = 0;
    ask(query);
    limit_ = static_cast<std::uint32_t>(std::min(graph.rows, keys_.count));
    const auto open = static_cast<std::size_t>(beam);
    keep = std::max(keep, beam);
    visited_.assign((static_cast<std::size_t>(limit_) + 63) / 64, 0);
    best_.clear();
    ids_.resize(std::max(graph.num_entries, expansions * graph.degree));
    scores_.resize(ids_.size());
    std::size_t first = 0;  // everything before has been expanded
    std::int64_t count = mark(graph.entries, graph.num_entries, 0);
    while (true) {
      first = std::min(first, rank(count, keep, &graph));
      count = 0;
      int expanded = 0;
      for (; first < std::min(best_.size(), open) && expanded < expansions; ++first) {
        if (best_[first] & 1) continue;
        best_[first] |= 1;
        count = mark(graph.of(id_of(best_[first])), graph.degree, count);
        ++expanded;
      }
      if (!expanded) return best_;
      // the lists that come next, if nothing better turns up
      for (std::size_t i = first; i < std::min({best_.size(), open, first + expansions}); ++i)
        fetch(graph.of(id_of(best_[i])), graph.degree * 4);
    }
  }

  // Scores the keys from `start` on and keeps the best k of all.
  const std::vector<Candidate>& scan(const float* query, std::int64_t start, int k) {
    constexpr std::int64_t block = 256;
    ask(query);
    if (static_cast<std::int64_t>(ids_.size()) < block) ids_.resize(block), scores_.resize(block);
    if (static_cast<int>(best_.size()) > k) best_.resize(k);
    for (; start < keys_.count; start += block) {
      const std::int64_t count = std::min(block, keys_.count - start);
      for (std::int64_t i = 0; i < count; ++i) ids_[i] = static_cast<std::uint32_t>(start + i);
      rank(count, k);
    }
    return best_;
  }

  std::int64_t scanned() const { return scanned_; }

 private:
  void ask(const float* query) {
    query_ = query;
    if (blocked_) packed_ = PackedQueries(query, 1, keys_.dim);
  }

  // On its way into the second-level cache, which can wait for more lines than the first.
  static void fetch(const void* memory, int bytes) {
    for (int at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const char*>(memory) + at, 0, 2);
  }

  void score(std::int64_t count) {
    if (!blocked_) return score_(keys_, query_, ids_.data(), count, scores_.data());
    places_.assign(ids_.begin(), ids_.begin() + count);
    const kvsift::Rows named{keys_.data, places_.data(), count, keys_.dim, keys_.bf16};
    kernels().dots(packed_.heads(0, 1), named, scores_.data(), count);
  }

  // Appends those of a list that were not seen before.
  std::int64_t mark(const std::uint32_t* list, int length, std::int64_t count) {
    const int row_bytes = keys_.dim * (keys_.bf16 ? 2 : 4);
    const char* rows = static_cast<const char*>(keys_.data);
    std::uint64_t* visited = visited_.data();
    std::uint32_t* ids = ids_.data();
    for (int i = 0; i < length && list[i] != no_row; ++i) {
      const std::uint32_t id = list[i];
      if (id >= limit_) continue;
      const std::uint64_t word = visited[id >> 6], bit = std::uint64_t{1} << (id & 63);
      visited[id >> 6] = word | bit;
      ids[count] = id;
      if (!(word & bit)) fetch(rows + static_cast<std::int64_t>(id) * row_bytes, row_bytes), ++count;
    }
    return count;
  }

  // Scores the marked keys and merges those that belong among the best. Returns the place of the first that is new.
  std::size_t rank(std::int64_t count, int capacity, const Graph* graph = nullptr) {
    score(count);
    scanned_ += count;
    const bool full = static_cast<int>(best_.size()) >= capacity;
    const Candidate worst = full ? best_.back() : 0;
    fresh_.clear();
    for (std::int64_t i = 0; i < count; ++i) {
      const Candidate c = candidate(scores_[i], ids_[i]);
      if (c > worst && scores_[i] == scores_[i]) fresh_.push_back(c);  // NaN is never found
    }
    if (fresh_.empty()) return best_.size();
    std::sort(fresh_.begin(), fresh_.end(), std::greater<Candidate>());
    if (graph != nullptr)  // the best of them are looked into next
      for (std::size_t i = 0; i < fresh_.size() && i < expansions; ++i)
        fetch(graph->of(id_of(fresh_[i])), graph->degree * 4);
    const std::size_t place =
        std::lower_bound(best_.begin(), best_.end(), fresh_[0], std::greater<Candidate>()) - best_.begin();
    merged_.resize(best_.size() + fresh_.size());
    std::copy(best_.begin(), best_.begin() + place, merged_.begin());
    std::merge(best_.begin() + place, best_.end(), fresh_.begin(), fresh_.end(), merged_.begin() + place,
               std::greater<Candidate>());
    if (static_cast<int>(merged_.size()) > capacity) merged_.resize(capacity);
    best_.swap(merged_);
    return place;
  }

  Rows keys_{};
  ScoreRows score_ = nullptr;  // of rows that the blocked kernels do not take
  bool blocked_ = false;
  const float* query_ = nullptr;
  PackedQueries packed_{nullptr, 0, 0};
  std::vector<std::int64_t> places_;
  std::uint32_t limit_ = 0;
  std::int64_t scanned_ = 0;
  std::vector<std::uint64_t> visited_;
  std::vector<Candidate> best_, fresh_, merged_;
  std::vector<std::uint32_t> ids_;
  std::vector<float> scores_;
};

// Rows of the graph that no path from the entries leads to.
inline std::int64_t unreachable(const Graph& graph) {
  std::vector<char> seen(static_cast<std::size_t>(graph.rows), 0);
  std::vector<std::uint32_t> open;
  auto visit = [&](const std::uint32_t* list, int length) {
    for (int i = 0; i < length && list[i] != no_row; ++i)
      if (list[i] < graph.rows && !seen[list[i]]) seen[list[i]] = 1, open.push_back(list[i]);
  };
  visit(graph.entries, graph.num_entries);
  for (std::size_t next = 0; next < open.size(); ++next) visit(graph.of(open[next]), graph.degree);
  return graph.rows - static_cast<std::int64_t>(open.size());
}

}  // namespace kvsift::graph
