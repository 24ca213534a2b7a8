// The graph without Python, for the sanitizers: built, searched in full and in part, cropped, from empty and odd lists;
// and the lists that it is built from.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "graph.hpp"
#include "parallel.hpp"
#include "top_rows.hpp"

using namespace kvsift;

namespace {

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "failed: %s\n", what);
  std::exit(1);
}

void check(int num_keys, int dim, int degree, int num_lists, int length, int threads, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> keys(std::size_t(num_keys) * dim), query(dim);
  for (float& number : keys) number = normal(random);
  std::vector<std::int32_t> lists(std::size_t(num_lists) * length);
  for (auto& id : lists) id = std::int32_t(random() % (num_keys + 1)) - 1;  // -1: a list that ends early
  std::vector<std::uint32_t> neighbours(std::size_t(num_keys) * degree), entries(16);
  graph::BuiltGraph built{neighbours.data(), entries.data(), 0};
  graph::build({lists.data(), num_lists, length}, {num_keys, degree, 1024, 16}, threads, built);
  std::vector<graph::Searcher> searchers(threads);
  parallel_for(8, threads, [&](std::int64_t task, int thread) {
    std::vector<float> asked(dim);
    std::mt19937 own(seed + unsigned(task));
    std::normal_distribution<float> drawn;  // it remembers a number
    for (float& number : asked) number = drawn(own);
    graph::Searcher& searcher = searchers[thread];
    searcher.bind({keys.data(), num_keys, dim, false}, graph::score_rows("generic"));
    const std::int64_t rows = task % 2 ? num_keys : num_keys / 2;  // cropped, what follows is scanned
    const graph::Graph graph{neighbours.data(), rows, degree, entries.data(), 16};
    const int k = 1 + int(task) * 3;
    searcher.walk(graph, asked.data(), num_keys, k);
    searcher.scan(rows, k);
    require(searcher.num_best() == std::min(k, num_keys), "as many results as there are");
    for (int i = 0; i < searcher.num_best(); ++i) {
      require(i == 0 || searcher.best()[i - 1] > searcher.best()[i], "results are in order, none twice");
      require(graph::id_of(searcher.best()[i]) < std::uint32_t(num_keys), "ids are rows");
    }
  });
  // side by side they meet what they meet alone
  const graph::Graph whole{neighbours.data(), num_keys, degree, entries.data(), 16};
  std::vector<graph::Searcher> walks(graph::side_by_side + 1);
  for (int i = 0; i <= graph::side_by_side; ++i) {
    walks[i].bind({keys.data(), num_keys, dim, false}, graph::score_rows("generic"));
    walks[i].start(whole, keys.data() + i % num_keys * dim, 10 + i, 5, i);
  }
  graph::finish(walks.data(), graph::side_by_side);
  for (int i = 0; i < graph::side_by_side; ++i) {
    graph::Searcher& alone = walks[graph::side_by_side];
    alone.start(whole, keys.data() + i % num_keys * dim, 10 + i, 5, i);
    graph::finish(&alone, 1);
    require(alone.num_best() == walks[i].num_best() && alone.scanned() == walks[i].scanned(), "as many keys");
    for (int b = 0; b < alone.num_best(); ++b) require(alone.best()[b] == walks[i].best()[b], "the same keys");
  }
  require(graph::unreachable({neighbours.data(), num_keys, degree, entries.data(), 16}) <= num_keys, "a count");
}

template <class T>
void check_rows(std::int64_t num_rows, std::int64_t count, std::int64_t k, int threads, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<T> scores(std::size_t(num_rows * count));
  for (T& score : scores) store(&score, float(int(random() % 7) - 3));  // many are equal
  std::vector<std::int64_t> stops(std::size_t(num_rows), 0);
  for (auto& stop : stops) stop = std::int64_t(random() % unsigned(count + 2));
  std::vector<std::int32_t> ids(std::size_t(num_rows * k));
  top_rows(scores.data(), num_rows, count, stops.data(), k, threads, ids.data());
  for (std::int64_t row = 0; row < num_rows; ++row) {
    const std::int64_t stop = std::min(stops[std::size_t(row)], count);
    std::vector<std::int32_t> order;
    for (std::int32_t i = 0; i < stop; ++i) order.push_back(i);
    const auto score = [&](std::int32_t i) { return load(&scores[std::size_t(row * count + i)]); };
    std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return score(a) > score(b); });
    order.resize(std::size_t(k), -1);
    if (stop < k) std::fill(order.begin() + stop, order.end(), -1);
    require(std::equal(order.begin(), order.end(), ids.begin() + row * k), "the best of a row, in order");
  }
}

}  // namespace

int main() {
  for (std::int64_t k : {1, 9, 130}) {
    check_rows<float>(5, 700, k, 3, unsigned(k));
    check_rows<std::uint16_t>(3, 65, k, 1, unsigned(k));
  }
  for (unsigned seed = 0; seed < 4; ++seed)
    for (int threads : {1, 3}) {
      check(1, 8, 4, 1, 1, threads, seed);
      check(50, 12, 6, 20, 7, threads, seed);  // 12: rows that the blocked kernels do not take
      check(700, 64, 16, 100, 30, threads, seed);
    }
  std::puts("graph: all right");
}
