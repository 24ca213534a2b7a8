// A graph over keys from the lists of what sampled queries found: keys that the same queries want are neighbours.
// Queries come from another distribution than keys, so nearness of keys among themselves is never asked.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <numeric>
#include <vector>

#include "graph_rows.hpp"
#include "parallel.hpp"

namespace kvsift::graph {

struct Lists {
  const std::int32_t* ids;  // [num_lists, length], best first, -1 pads at the end
  std::int64_t num_lists;
  int length;

  const std::int32_t* of(std::int64_t list) const { return ids + list * length; }
};

struct BuildPlan {
  std::int64_t num_keys;
  int degree;       // at least 4
  int lists_per_key;  // of the lists that contain a key, at most so many are counted
  int num_entries;
};

// Which lists contain a key.
struct Inverted {
  std::vector<std::int64_t> starts;  // [num_keys + 1]
  std::vector<std::int32_t> lists;   // ascending for each key

  Inverted(const Lists& lists_of, std::int64_t num_keys) : starts(static_cast<std::size_t>(num_keys) + 1, 0) {
    each(lists_of, [&](std::int64_t, std::int32_t id) { ++starts[id + 1]; });
    std::partial_sum(starts.begin(), starts.end(), starts.begin());
    lists.resize(static_cast<std::size_t>(starts.back()));
    std::vector<std::int64_t> ends(starts.begin(), starts.end() - 1);
    each(lists_of, [&](std::int64_t list, std::int32_t id) { lists[ends[id]++] = static_cast<std::int32_t>(list); });
  }

  std::int64_t frequency(std::int64_t key) const { return starts[key + 1] - starts[key]; }

 private:
  template <class Fn>
  static void each(const Lists& lists_of, Fn&& fn) {
    for (std::int64_t list = 0; list < lists_of.num_lists; ++list)
      for (int i = 0; i < lists_of.length && lists_of.of(list)[i] >= 0; ++i) fn(list, lists_of.of(list)[i]);
  }
};

// The keys that share most lists with a key, best first. A key that is everywhere shares lists with all: counts are
// divided by a power of the partner's frequency. At 0.5 rare partners take the place of keys that lead on, at 0.2 rare
// keys are not led to: 0.35 scanned least for the same recall, on peaky and on diffuse data.
constexpr float hub_exponent = 0.35f;

// counts are multiplied by these
inline std::vector<float> partner_weights(const Inverted& inverted, std::int64_t num_keys) {
  std::vector<float> weights(static_cast<std::size_t>(num_keys));
  for (std::int64_t key = 0; key < num_keys; ++key)
    weights[key] = std::pow(static_cast<float>(std::max<std::int64_t>(1, inverted.frequency(key))), -hub_exponent);
  return weights;
}

class Partners {
 public:
  Partners(const Lists& lists, const Inverted& inverted, const std::vector<float>& weights, int lists_per_key)
      : lists_(lists), inverted_(inverted), weights_(weights), lists_per_key_(lists_per_key),
        counts_(weights.size(), 0) {}

  // Writes at most `wanted` partners of `key`; returns how many.
  int find(std::int64_t key, int wanted, std::uint32_t* partners) {
    const std::int64_t start = inverted_.starts[key], frequency = inverted_.frequency(key);
    const std::int64_t counted = std::min<std::int64_t>(frequency, lists_per_key_);
    touched_.clear();
    for (std::int64_t i = 0; i < counted; ++i) {
      const std::int32_t* list = lists_.of(inverted_.lists[start + i * frequency / counted]);
      for (int j = 0; j < lists_.length && list[j] >= 0; ++j)
        if (!counts_[list[j]]++) touched_.push_back(static_cast<std::uint32_t>(list[j]));
    }
    ranked_.clear();
    for (const std::uint32_t other : touched_) {
      const float score = static_cast<float>(counts_[other]) * weights_[other];
      counts_[other] = 0;
      if (other == key) continue;
      std::uint32_t bits;
      std::memcpy(&bits, &score, sizeof bits);  // of positive floats: ordered as the floats are
      ranked_.push_back(static_cast<std::uint64_t>(bits) << 32 | (no_row - other));
    }
    const int found = static_cast<int>(std::min<std::size_t>(ranked_.size(), static_cast<std::size_t>(wanted)));
    std::partial_sort(ranked_.begin(), ranked_.begin() + found, ranked_.end(), std::greater<std::uint64_t>());
    for (int i = 0; i < found; ++i) partners[i] = no_row - static_cast<std::uint32_t>(ranked_[i]);
    return found;
  }

 private:
  const Lists& lists_;
  const Inverted& inverted_;
  const std::vector<float>& weights_;
  int lists_per_key_;
  std::vector<std::int32_t> counts_;
  std::vector<std::uint32_t> touched_;
  std::vector<std::uint64_t> ranked_;
};

// Neighbours [num_keys, degree]. Three quarters of a key's slots go to its best partners, the others to keys that want
// it as theirs, those that rank it highest first, and then to further partners. The keys beside it take the last two:
// they lead to keys that no sampled query wanted, which have no others.
inline void link(const std::vector<std::vector<std::uint32_t>>& partners, const BuildPlan& plan,
                 std::uint32_t* neighbours) {
  const int degree = plan.degree, slots = degree - 2, forward = (3 * slots + 3) / 4;
  const std::int64_t n = plan.num_keys;
  std::fill(neighbours, neighbours + n * degree, no_row);
  std::vector<int> used(static_cast<std::size_t>(n), 0);
  auto add = [&](std::int64_t key, std::uint32_t other, int capacity) {
    std::uint32_t* list = neighbours + key * degree;
    if (used[key] >= capacity || std::find(list, list + used[key], other) != list + used[key]) return;
    list[used[key]++] = other;
  };
  std::size_t ranks = 0;
  for (std::int64_t key = 0; key < n; ++key) {
    ranks = std::max(ranks, partners[key].size());
    for (const std::uint32_t other : partners[key]) add(key, other, forward);
  }
  for (std::size_t rank = 0; rank < ranks; ++rank)
    for (std::int64_t key = 0; key < n; ++key)
      if (rank < partners[key].size()) add(partners[key][rank], static_cast<std::uint32_t>(key), slots);
  for (std::int64_t key = 0; key < n; ++key) {
    for (const std::uint32_t other : partners[key]) add(key, other, slots);
    if (key > 0) add(key, static_cast<std::uint32_t>(key - 1), degree);
    if (key + 1 < n) add(key, static_cast<std::uint32_t>(key + 1), degree);
  }
}

// Keys to start from: one after the other, the key that is in most lists without a start so far. An eighth is spread
// over all positions, so that a roll-back leaves some.
inline void choose_entries(const Lists& lists, const Inverted& inverted, const BuildPlan& plan,
                           std::uint32_t* entries) {
  const std::int64_t n = plan.num_keys;
  std::fill(entries, entries + plan.num_entries, no_row);
  int used = 0;
  auto add = [&](std::int64_t key) {
    const auto id = static_cast<std::uint32_t>(key);
    if (std::find(entries, entries + used, id) == entries + used) entries[used++] = id;
  };
  const int spread = std::max(1, plan.num_entries / 8);
  for (int i = 0; i < spread && n; ++i) add(n * i / spread);
  std::vector<std::int64_t> gains(static_cast<std::size_t>(n));
  for (std::int64_t key = 0; key < n; ++key) gains[key] = inverted.frequency(key);
  std::vector<char> covered(static_cast<std::size_t>(lists.num_lists), 0);
  while (n && used < plan.num_entries) {
    const std::int64_t key = std::max_element(gains.begin(), gains.end()) - gains.begin();
    if (!gains[key]) break;
    add(key);
    for (std::int64_t i = inverted.starts[key]; i < inverted.starts[key + 1]; ++i) {
      const std::int32_t list = inverted.lists[i];
      if (covered[list]) continue;
      covered[list] = 1;
      for (int j = 0; j < lists.length && lists.of(list)[j] >= 0; ++j) --gains[lists.of(list)[j]];
    }
  }
}

struct BuiltGraph {
  std::uint32_t* neighbours;  // [num_keys, degree]
  std::uint32_t* entries;     // [num_entries], no_row pads at the end
  std::int64_t unseen;        // keys in no list
};

// One graph on `num_threads` threads, the same whatever their number.
inline void build(const Lists& lists, const BuildPlan& plan, int num_threads, BuiltGraph& built) {
  constexpr std::int64_t block = 2048;
  const Inverted inverted(lists, plan.num_keys);
  built.unseen = 0;
  for (std::int64_t key = 0; key < plan.num_keys; ++key) built.unseen += !inverted.frequency(key);
  const std::vector<float> weights = partner_weights(inverted, plan.num_keys);
  std::vector<std::vector<std::uint32_t>> partners(static_cast<std::size_t>(plan.num_keys));
  std::vector<Partners> finders(static_cast<std::size_t>(num_threads),
                                Partners(lists, inverted, weights, plan.lists_per_key));
  parallel_for((plan.num_keys + block - 1) / block, num_threads, [&](std::int64_t task, int thread) {
    std::vector<std::uint32_t> found(static_cast<std::size_t>(plan.degree));
    for (std::int64_t key = task * block; key < std::min(plan.num_keys, (task + 1) * block); ++key) {
      if (!inverted.frequency(key)) continue;
      partners[key].assign(found.begin(), found.begin() + finders[thread].find(key, plan.degree, found.data()));
    }
  });
  link(partners, plan, built.neighbours);
  choose_entries(lists, inverted, plan, built.entries);
}

}  // namespace kvsift::graph
