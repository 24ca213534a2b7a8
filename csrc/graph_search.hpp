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

// One search. It goes in turns of two halves, each of which asks for the memory that the next one reads: run several
// searches side by side, half a turn of each at a time, and none of them waits.
class Searcher {
 public:
  void bind(const Rows& keys, ScoreRows score) {
    keys_ = keys, score_ = score;
    blocked_ = keys.dim % 8 == 0 && keys.dim <= kMaxHeadDim;
  }

  // Begins a walk that keeps the best keys it meets. It ends when the best `beam` of them have been looked into, or when
  // the last `patience` looks brought nothing among the best `k`; 0 is endless patience.
  void start(const Graph& graph, const float* query, int beam, int k, int patience = 0) {
    graph_ = graph;
    limit_ = static_cast<std::uint32_t>(std::min(graph.rows, keys_.count));
    beam_ = static_cast<std::size_t>(beam);
    wanted_ = static_cast<std::size_t>(k), patience_ = patience, in_vain_ = 0;
    scanned_ = 0, first_ = 0;
    visited_.assign((static_cast<std::size_t>(limit_) + 64) / 64, 0);
    visited_[limit_ >> 6] |= std::uint64_t{1} << (limit_ & 63);  // stands for all that lies behind
    reserve(static_cast<std::size_t>(std::max(k, beam)), std::max(graph.num_entries, expansions * graph.degree));
    ask(query);
    mark(graph.entries, graph.num_entries);
  }

  // Scores what was marked, and chooses where to look next. False: the walk has ended.
  bool choose() {
    const std::size_t place = rank();
    first_ = std::min(first_, place);
    in_vain_ = place < wanted_ ? 0 : in_vain_ + num_chosen_;
    num_chosen_ = 0;
    if (patience_ > 0 && in_vain_ >= patience_) return false;
    for (const std::size_t stop = std::min(num_best_, beam_); first_ < stop && num_chosen_ < expansions; ++first_) {
      if (best_[first_] & 1) continue;
      best_[first_] |= 1;
      chosen_[num_chosen_] = graph_.of(id_of(best_[first_]));
      fetch(chosen_[num_chosen_++], graph_.degree * 4);
    }
    return num_chosen_ > 0;
  }

  // Marks the neighbours of what was chosen.
  void gather() {
    for (int i = 0; i < num_chosen_; ++i) mark(chosen_[i], graph_.degree);
  }

  // Start to end, alone. The best are valid until the next start.
  void walk(const Graph& graph, const float* query, int beam, int k) {
    start(graph, query, beam, k);
    while (choose()) gather();
  }

  // Scores the keys from `start` on and keeps the best k of all.
  void scan(std::int64_t start, int k) {
    constexpr std::int64_t block = 256;
    num_best_ = std::min(num_best_, static_cast<std::size_t>(k));
    reserve(static_cast<std::size_t>(k), block);
    for (; start < keys_.count; start += block) {
      for (; marked_ < std::min(block, keys_.count - start); ++marked_) ids_[marked_] = start + marked_;
      rank();
    }
  }

  // Of all that was met, best first.
  const Candidate* best() const { return best_.data(); }
  int num_best() const { return static_cast<int>(num_best_); }
  std::int64_t scanned() const { return scanned_; }

 private:
  void ask(const float* query) {
    query_ = query;
    num_best_ = 0, marked_ = 0;
    if (blocked_) packed_ = PackedQueries(query, 1, keys_.dim);
  }

  void reserve(std::size_t capacity, std::int64_t most_marked) {
    capacity_ = capacity;
    const auto marked = static_cast<std::size_t>(most_marked) + 1;  // one place for what is written and not counted
    if (best_.size() < capacity + marked) best_.resize(capacity + marked);
    if (ids_.size() < marked) ids_.resize(marked), scores_.resize(marked), fresh_.resize(marked);
  }

  // On its way into the second-level cache, which can wait for more lines than the first.
  static void fetch(const void* memory, int bytes) {
    for (int at = 0; at < bytes; at += 64) __builtin_prefetch(static_cast<const char*>(memory) + at, 0, 2);
  }

  void score() {
    if (blocked_) {
      const kvsift::Rows named{keys_.data, ids_.data(), marked_, keys_.dim, kvsift::plain(keys_.bf16)};
      return kernels().dots(packed_.heads(0, 1), named, scores_.data(), marked_);
    }
    narrow_.assign(ids_.begin(), ids_.begin() + marked_);
    score_(keys_, query_, narrow_.data(), marked_, scores_.data());
  }

  // Notes those of a list that were not seen before, and asks for their rows. Nothing is guessed: a branch that depends
  // on what was seen would be mispredicted for every other key.
  void mark(const std::uint32_t* list, int length) {
    const int row_bytes = keys_.dim * (keys_.bf16 ? 2 : 4);
    const char* rows = static_cast<const char*>(keys_.data);
    std::uint64_t* visited = visited_.data();
    std::int64_t* ids = ids_.data();
    std::int64_t count = marked_;
    for (int i = 0; i < length; ++i) {
      const std::uint32_t id = std::min(list[i], limit_);
      const std::uint64_t word = visited[id >> 6], bit = std::uint64_t{1} << (id & 63);
      visited[id >> 6] = word | bit;
      ids[count] = id;
      count += (word & bit) == 0;
    }
    for (; marked_ < count; ++marked_) fetch(rows + ids[marked_] * row_bytes, row_bytes);
  }

  // Scores the marked keys and takes in those that belong among the best. Returns the place of the first that is new.
  std::size_t rank() {
    score();
    scanned_ += marked_;
    const Candidate worst = num_best_ < capacity_ ? 0 : best_[num_best_ - 1];
    Candidate* fresh = fresh_.data();
    std::size_t count = 0;
    for (std::int64_t i = 0; i < marked_; ++i) {
      const Candidate c = candidate(scores_[i], static_cast<std::uint32_t>(ids_[i]));
      fresh[count] = c;
      count += (c > worst) & (scores_[i] == scores_[i]);  // NaN is never found
    }
    marked_ = 0;
    if (count == 0) return num_best_;
    std::sort(fresh, fresh + count, std::greater<Candidate>());
    return merge(fresh, count);
  }

  // From the end: of the best, only what lies behind something new is moved, and once.
  std::size_t merge(const Candidate* fresh, std::size_t count) {
    Candidate* best = best_.data();
    std::size_t stop = num_best_;  // best[stop, ...) has been moved
    num_best_ = std::min(num_best_ + count, capacity_);
    for (; count > 0; --count) {
      const std::size_t place = places_before(best, stop, fresh[count - 1]);
      std::memmove(best + place + count, best + place, (stop - place) * sizeof(Candidate));
      best[place + count - 1] = fresh[count - 1];
      stop = place;
    }
    return stop;
  }

  // How many of the first `count` are better than c.
  static std::size_t places_before(const Candidate* best, std::size_t count, Candidate c) {
    const Candidate* first = best;
    while (count > 0) {
      const std::size_t half = count / 2;
      const bool better = first[half] > c;
      first = better ? first + half + 1 : first;
      count = better ? count - half - 1 : half;
    }
    return static_cast<std::size_t>(first - best);
  }

  Graph graph_{};
  Rows keys_{};
  ScoreRows score_ = nullptr;  // of rows that the blocked kernels do not take
  bool blocked_ = false;
  const float* query_ = nullptr;
  PackedQueries packed_{nullptr, 0, 0};
  std::uint32_t limit_ = 0;
  std::size_t beam_ = 0, capacity_ = 0;
  std::size_t wanted_ = 0;
  int patience_ = 0, in_vain_ = 0;
  std::size_t first_ = 0;  // of the best, everything before has been looked into
  std::int64_t scanned_ = 0;
  const std::uint32_t* chosen_[expansions];  // lists
  int num_chosen_ = 0;
  std::vector<std::uint64_t> visited_;
  std::vector<Candidate> best_, fresh_;
  std::size_t num_best_ = 0;
  std::vector<std::int64_t> ids_;
  std::int64_t marked_ = 0;
  std::vector<float> scores_;
  std::vector<std::uint32_t> narrow_;
};

constexpr int side_by_side = 4;  // walks of a thread: two hide most of the waiting, eight begin to need the cache

// Runs walks that have been started to their ends, half a turn of each at a time.
inline void finish(Searcher* walks, int count) {
  Searcher* running[side_by_side];
  int num_running = std::min(count, side_by_side);
  for (int i = 0; i < num_running; ++i) running[i] = walks + i;
  while (num_running > 0) {
    num_running = static_cast<int>(
        std::remove_if(running, running + num_running, [](Searcher* walk) { return !walk->choose(); }) - running);
    for (int i = 0; i < num_running; ++i) running[i]->gather();
  }
}

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
