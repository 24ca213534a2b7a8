// Graph indexes for Python. Tensors come as addresses and shapes that Python has checked.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "graph.hpp"
#include "parallel.hpp"
#include "top_rows.hpp"

namespace nb = nanobind;
using namespace kvsift;

namespace {

template <class T>
T* at(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// KV head h's keys: `rows` of a [num_kv_heads, count, dim] tensor whose heads are `stride` numbers apart.
graph::Rows head_of(std::uintptr_t keys, std::int64_t head, std::int64_t stride, std::int64_t count, int dim, bool bf16) {
  const std::int64_t number_bytes = bf16 ? 2 : 4;
  return {at<const char>(keys) + head * stride * number_bytes, count, dim, bf16};
}

// What lists are made of: ids int32 [num_rows, k] of scores [num_rows, count]. stops may be 0.
void best_of_rows(std::uintptr_t scores, bool bf16, std::int64_t num_rows, std::int64_t count, std::uintptr_t stops,
                  std::int64_t k, int threads, std::uintptr_t ids) {
  nb::gil_scoped_release release;
  if (bf16)
    top_rows(at<const std::uint16_t>(scores), num_rows, count, at<const std::int64_t>(stops), k, threads,
             at<std::int32_t>(ids));
  else
    top_rows(at<const float>(scores), num_rows, count, at<const std::int64_t>(stops), k, threads, at<std::int32_t>(ids));
}

// -> keys in no list
std::int64_t build(std::uintptr_t lists, std::int64_t num_lists, int list_length, std::int64_t num_keys, int degree,
                   int lists_per_key, std::uintptr_t neighbours, std::uintptr_t entries, int num_entries, int threads) {
  nb::gil_scoped_release release;
  graph::BuiltGraph built{at<std::uint32_t>(neighbours), at<std::uint32_t>(entries), 0};
  graph::build({at<const std::int32_t>(lists), num_lists, list_length},
               {num_keys, degree, lists_per_key, num_entries}, threads, built);
  return built.unseen;
}

// -> keys in no list
std::int64_t build_paper(std::uintptr_t keys, std::int64_t num_keys, int dim, bool bf16, std::uintptr_t lists,
                         std::int64_t num_lists, int list_length, int degree, int beam, std::uintptr_t neighbours,
                         std::uintptr_t entries, int threads, const std::string& level) {
  nb::gil_scoped_release release;
  graph::BuiltGraph built{at<std::uint32_t>(neighbours), at<std::uint32_t>(entries), 0};
  graph::PaperGraph paper(head_of(keys, 0, 0, num_keys, dim, bf16), graph::score_rows(level), degree, beam, threads);
  paper.build({at<const std::int32_t>(lists), num_lists, list_length}, built);
  return built.unseen;
}

std::int64_t unreachable(std::uintptr_t neighbours, std::int64_t rows, int degree, std::uintptr_t entries,
                         int num_entries) {
  nb::gil_scoped_release release;
  return graph::unreachable(
      {at<const std::uint32_t>(neighbours), rows, degree, at<const std::uint32_t>(entries), num_entries});
}

void write_found(const graph::Searcher& walk, int k, std::int64_t* ids, float* scores) {
  for (int i = 0; i < k; ++i) {
    const bool found = i < walk.num_best();
    ids[i] = found ? std::int64_t{graph::id_of(walk.best()[i])} : -1;
    scores[i] = found ? graph::score_of(walk.best()[i]) : -INFINITY;
  }
}

// Graphs are [num_graphs, graph_rows, degree], of which the first `rows` rows hold; keys from there on are scanned.
// queries float32 [num_query_heads, dim]; ids and scores [num_query_heads, k]. -> keys scored per query head
std::vector<std::int64_t> search(std::uintptr_t queries, int num_query_heads, std::uintptr_t keys, int num_kv_heads,
                                 std::int64_t stride, std::int64_t num_keys, int dim, bool bf16,
                                 std::uintptr_t neighbours, int num_graphs, std::int64_t graph_rows, std::int64_t rows,
                                 int degree, std::uintptr_t entries, int num_entries, const std::vector<int>& beams,
                                 const std::vector<int>& patience, int k, std::uintptr_t ids, std::uintptr_t scores, int threads,
                                 const std::string& level) {
  nb::gil_scoped_release release;
  const graph::ScoreRows score = graph::score_rows(level);
  std::vector<std::int64_t> scanned(static_cast<std::size_t>(num_query_heads));
  // several walks at a time, but not so many that a thread has none
  const int together = std::max(1, std::min(graph::side_by_side, num_query_heads / std::max(1, threads)));
  std::vector<graph::Searcher> searchers(static_cast<std::size_t>(threads) * together);
  parallel_for((num_query_heads + together - 1) / together, threads, [&](std::int64_t task, int thread) {
    const int first = static_cast<int>(task) * together, count = std::min(together, num_query_heads - first);
    graph::Searcher* walks = &searchers[static_cast<std::size_t>(thread) * together];
    for (int i = 0; i < count; ++i) {
      const std::int64_t head = first + i;
      const std::int64_t kv_head = head * num_kv_heads / num_query_heads, g = head * num_graphs / num_query_heads;
      walks[i].bind(head_of(keys, kv_head, stride, num_keys, dim, bf16), score);
      walks[i].start({at<const std::uint32_t>(neighbours) + g * graph_rows * degree, rows, degree,
                      at<const std::uint32_t>(entries) + g * num_entries, num_entries},
                     at<const float>(queries) + head * dim, beams[head], k, patience[head]);
    }
    graph::finish(walks, count);
    for (int i = 0; i < count; ++i) {
      const std::int64_t head = first + i;
      walks[i].scan(rows, k);
      write_found(walks[i], k, at<std::int64_t>(ids) + head * k, at<float>(scores) + head * k);
      scanned[head] = walks[i].scanned();
    }
  });
  return scanned;
}

}  // namespace

void bind_graph(nb::module_& m) {
  m.def("top_rows", &best_of_rows);
  m.def("graph_build", &build);
  m.def("graph_build_paper", &build_paper);
  m.def("graph_unreachable", &unreachable);
  m.def("graph_search", &search);
}
