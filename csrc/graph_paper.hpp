// The graph as RoarGraph builds it, which the paper of RetrievalAttention uses (arXiv 2409.10516): for comparison.
// Each sampled query's nearest key becomes a star to the other keys it found, thinned by occlusion; then every key is
// looked for in the graph and linked to what the search met. The distance is minus the inner product throughout.
// Queries that share their nearest key add to one star, where the published code keeps the last one only.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "graph_build.hpp"
#include "graph_rows.hpp"
#include "graph_search.hpp"
#include "parallel.hpp"

namespace kvsift::graph {

class PaperGraph {
 public:
  // Lists of `degree` after the projection, of 2 * degree in the end, which is the width of `neighbours`.
  PaperGraph(const Rows& keys, ScoreRows score, int degree, int beam, int num_threads)
      : keys_(keys), score_(score), degree_(degree), beam_(beam), threads_(num_threads),
        links_(static_cast<std::size_t>(keys.count)) {}

  void build(const Lists& lists, BuiltGraph& built) {
    project(lists);
    entry_ = medoid();
    connect();
    const int width = 2 * degree_;
    std::fill(built.neighbours, built.neighbours + keys_.count * width, no_row);
    for (std::int64_t key = 0; key < keys_.count; ++key)
      std::copy(links_[key].begin(), links_[key].end(), built.neighbours + key * width);
    built.entries[0] = entry_;
    built.unseen = 0;
    const Inverted inverted(lists, keys_.count);
    for (std::int64_t key = 0; key < keys_.count; ++key) built.unseen += !inverted.frequency(key);
  }

 private:
  using List = std::vector<std::uint32_t>;

  std::vector<float> row(std::uint32_t key) const {
    std::vector<float> wide(static_cast<std::size_t>(keys_.dim));
    for (int c = 0; c < keys_.dim; ++c) {
      const std::int64_t at = static_cast<std::int64_t>(key) * keys_.dim + c;
      wide[c] = keys_.bf16 ? detail::widen(static_cast<const std::uint16_t*>(keys_.data)[at])
                           : static_cast<const float*>(keys_.data)[at];
    }
    return wide;
  }

  std::vector<float> scores(std::uint32_t key, const List& others) const {
    std::vector<float> found(others.size());
    score_(keys_, row(key).data(), others.data(), static_cast<std::int64_t>(others.size()), found.data());
    return found;
  }

  // Candidates nearest first, without repeats and without `key`.
  List sorted(std::uint32_t key, List list) const {
    const std::vector<float> found = scores(key, list);
    std::vector<Candidate> order(list.size());
    for (std::size_t i = 0; i < list.size(); ++i) order[i] = candidate(found[i], list[i]);
    std::sort(order.begin(), order.end(), std::greater<Candidate>());
    order.erase(std::unique(order.begin(), order.end()), order.end());
    list.clear();
    for (const Candidate c : order)
      if (id_of(c) != key) list.push_back(id_of(c));
    return list;
  }

  // At most degree of the candidates: those that no kept one is nearer to than `key` is, then the nearest of the others.
  List prune(std::uint32_t key, const List& nearest_first) const {
    const std::vector<float> to_key = scores(key, nearest_first);
    List kept, others;
    for (std::size_t i = 0; i < nearest_first.size() && static_cast<int>(kept.size()) < degree_; ++i) {
      const std::vector<float> to_kept = scores(nearest_first[i], kept);
      const bool hidden = std::any_of(to_kept.begin(), to_kept.end(), [&](float s) { return s > to_key[i]; });
      (hidden ? others : kept).push_back(nearest_first[i]);
    }
    for (std::size_t i = 0; i < others.size() && static_cast<int>(kept.size()) < degree_; ++i)
      kept.push_back(others[i]);
    return kept;
  }

  void project(const Lists& lists) {
    std::vector<List> stars(links_.size());
    for (std::int64_t list = 0; list < lists.num_lists; ++list) {
      const std::int32_t* ids = lists.of(list);
      for (int i = 1; i < lists.length && ids[i] >= 0; ++i) stars[ids[0]].push_back(ids[i]);
    }
    parallel_for(keys_.count, threads_, [&](std::int64_t key, int) {
      const auto pivot = static_cast<std::uint32_t>(key);
      if (!stars[key].empty()) links_[key] = prune(pivot, sorted(pivot, std::move(stars[key])));
    });
    const std::vector<List> forward = links_;
    for (std::size_t key = 0; key < forward.size(); ++key)
      for (const std::uint32_t other : forward[key]) {
        List& back = links_[other];
        if (std::find(back.begin(), back.end(), key) != back.end()) continue;
        back.push_back(static_cast<std::uint32_t>(key));
        if (static_cast<int>(back.size()) > degree_) back = prune(other, sorted(other, back));
      }
  }

  // The key nearest to the mean of all, in Euclidean distance. Most keys have no links yet: of those that have, for a
  // search from another one would meet nothing.
  std::uint32_t medoid() const {
    std::vector<double> sum(static_cast<std::size_t>(keys_.dim), 0.0);
    for (std::int64_t key = 0; key < keys_.count; ++key) {
      const std::vector<float> wide = row(static_cast<std::uint32_t>(key));
      for (int c = 0; c < keys_.dim; ++c) sum[c] += wide[c];
    }
    std::uint32_t nearest = 0;
    double least = std::numeric_limits<double>::infinity();
    for (std::int64_t key = 0; key < keys_.count; ++key) {
      if (links_[key].empty()) continue;
      const std::vector<float> wide = row(static_cast<std::uint32_t>(key));
      double distance = 0;
      for (int c = 0; c < keys_.dim; ++c) {
        const double gap = wide[c] - sum[c] / static_cast<double>(keys_.count);
        distance += gap * gap;
      }
      if (distance < least) nearest = static_cast<std::uint32_t>(key), least = distance;
    }
    return nearest;
  }

  void connect() {
    std::vector<std::uint32_t> frozen(links_.size() * degree_, no_row);
    for (std::size_t key = 0; key < links_.size(); ++key)
      std::copy(links_[key].begin(), links_[key].end(), frozen.begin() + key * degree_);
    const Graph graph{frozen.data(), keys_.count, degree_, &entry_, 1};
    std::vector<Searcher> searchers(static_cast<std::size_t>(threads_));
    for (Searcher& searcher : searchers) searcher.bind(keys_, score_);
    std::vector<List> met(links_.size());
    parallel_for(keys_.count, threads_, [&](std::int64_t key, int thread) {
      const auto id = static_cast<std::uint32_t>(key);
      const List& linked = links_[key];
      List list;
      Searcher& searcher = searchers[thread];
      searcher.walk(graph, row(id).data(), beam_, beam_);
      for (int i = 0; i < searcher.num_best(); ++i) {
        const std::uint32_t other = id_of(searcher.best()[i]);
        if (other != id && std::find(linked.begin(), linked.end(), other) == linked.end()) list.push_back(other);
      }
      met[key] = prune(id, list);
    });
    for (std::size_t key = 0; key < links_.size(); ++key)
      for (const std::uint32_t other : met[key]) append(static_cast<std::uint32_t>(key), other);
    for (std::size_t key = 0; key < links_.size(); ++key)
      for (const std::uint32_t other : met[key]) append(other, static_cast<std::uint32_t>(key));
  }

  void append(std::uint32_t key, std::uint32_t other) {
    List& list = links_[key];
    if (static_cast<int>(list.size()) < 2 * degree_ && std::find(list.begin(), list.end(), other) == list.end())
      list.push_back(other);
  }

  Rows keys_;
  ScoreRows score_;
  int degree_, beam_, threads_;
  std::vector<List> links_;
  std::uint32_t entry_ = 0;
};

}  // namespace kvsift::graph
