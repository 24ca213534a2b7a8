// Exact search without an index: every key is scored, once for all queries of a group.
#pragma once

#include <atomic>
#include <cmath>
#include <memory>

#include "heads.hpp"
#include "parallel.hpp"
#include "top_k.hpp"

namespace kvsift {

struct Matches {
  std::int64_t* ids;  // [num_query_heads, k]; -1 in the last places if there are fewer than k keys
  float* scores;      // [num_query_heads, k]; -inf where the id is -1
};

constexpr std::int64_t kScanRows = 512;  // rows per block of scores

// Memory of a thread, reused by all calls: to clear new memory costs more than the search.
struct ScanScratch {
  std::vector<Best> best;
  std::vector<float> scores;
  std::vector<std::int64_t> ids;
  std::vector<Scored> candidates;

  static ScanScratch& of_thread() {
    thread_local ScanScratch scratch;
    return scratch;
  }
};

// Lower bounds of the k-th best score of each query: rows below the bound are not among the best k. All tasks share the
// bounds; this saves work and changes no result.
class Bars {
 public:
  explicit Bars(std::size_t num_queries) : count_(num_queries), bars_(new std::atomic<float>[num_queries]) { lower(); }
  void lower() {
    for (std::size_t q = 0; q < count_; ++q) bars_[q] = -std::numeric_limits<float>::infinity();
  }
  float bar(std::size_t query) const { return bars_[query].load(std::memory_order_relaxed); }
  void raise(std::size_t query, float score) {
    float now = bar(query);
    while (score > now && !bars_[query].compare_exchange_weak(now, score, std::memory_order_relaxed)) {
    }
  }

 private:
  std::size_t count_;
  std::unique_ptr<std::atomic<float>[]> bars_;
};

// Writes the best k rows of [start, stop) that reach the bars to scratch.best, for num_queries queries from first_query on;
// score(first_row, count, scores) fills [num_queries, kScanRows].
template <class Score>
void scan_rows(std::int64_t start, std::int64_t stop, std::size_t first_query, int num_queries, std::int64_t k, Bars& bars,
               ScanScratch& scratch, Score&& score) {
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  const Kernels& level = kernels();
  if (scratch.best.size() < std::size_t(num_queries)) scratch.best.resize(std::size_t(num_queries));
  for (int q = 0; q < num_queries; ++q) scratch.best[std::size_t(q)].reset(k);
  scratch.scores.resize(std::size_t(num_queries) * kScanRows);
  std::int32_t positions[kScanRows];
  for (std::int64_t row = start; row < stop; row += kScanRows) {
    const std::int64_t count = std::min(kScanRows, stop - row);
    score(row, count, scratch.scores.data());
    for (int q = 0; q < num_queries; ++q) {
      const std::size_t query = first_query + std::size_t(q);
      const float* scores = scratch.scores.data() + q * kScanRows;
      Best& best = scratch.best[std::size_t(q)];
      // a score equal to the bar may be among the best k by its id
      const float bar = std::nextafter(bars.bar(query), kNone);
      std::int64_t i = 0;
      if (bar == kNone) {
        for (; i < count && !best.full(); ++i) best.offer(scores[i], std::uint32_t(row + i));
        if (i > 0) best.shrink();
      }
      const float before = best.threshold();
      const std::int64_t count_above = level.above(scores + i, count - i, std::max(before, bar), positions);
      for (std::int64_t j = 0; j < count_above; ++j) best.offer(scores[i + positions[j]], std::uint32_t(row + i + positions[j]));
      if (i > 0 || best.threshold() > before) bars.raise(query, best.threshold());
    }
  }
}

// Rows per task, a multiple of kScanRows: enough tasks for many threads, and many more rows than k, so that the best k of
// each task cost less than the scan.
inline std::int64_t scan_part(std::int64_t length, int num_kv_heads, std::int64_t k) {
  const std::int64_t even = std::max(length * num_kv_heads / 32, 8 * k);
  return std::max((even + kScanRows - 1) / kScanRows, std::int64_t{8}) * kScanRows;
}

constexpr std::int64_t kSampledRows = 16;    // next to each other, one of 32 such blocks
constexpr std::int64_t kSampledFrom = 1024;  // k from which a sample saves more than it costs

// Estimates from a sample bars that about one and a half times k rows reach: a search for thousands then keeps few rows that
// it drops later. If fewer than k rows reach a bar, the caller scans again without bars.
template <class Score>
void guess_bars(int num_kv_heads, int group, std::int64_t length, std::int64_t k, int threads, Bars& bars, Score&& score) {
  constexpr std::int64_t step = 32 * kSampledRows;
  if (k < kSampledFrom) return;
  const std::int64_t blocks = length / step, count = blocks * kSampledRows;
  const std::int64_t rank = k * 3 / 2 * count / length + 8;
  if (rank >= count) return;
  parallel_for(num_kv_heads, threads, [&](std::int64_t h, int) {
    std::vector<float> block(std::size_t(group) * kScanRows), sampled(std::size_t(group * count));
    for (std::int64_t b = 0; b < blocks; ++b) {
      score(int(h), b * step, kSampledRows, block.data());
      for (int q = 0; q < group; ++q)
        std::copy_n(block.begin() + q * kScanRows, kSampledRows, sampled.begin() + q * count + b * kSampledRows);
    }
    for (int q = 0; q < group; ++q) {
      const auto first = sampled.begin() + q * count;
      for (auto score = first; score != first + count; ++score) *score = score_of(rank_of(*score));  // NaN has no order
      std::nth_element(first, first + rank, first + count, std::greater<float>());
      bars.raise(std::size_t(h) * std::size_t(group) + std::size_t(q), first[rank]);
    }
  });
}

// Calls score(kv_head, first_row, count, scores) as in scan_rows for the group of each KV head, then finish(query_head, best)
// with the best k of each query head.
template <class Score, class Finish>
void scan_heads(int num_kv_heads, int group, std::int64_t length, std::int64_t k, int threads, Score&& score,
                Finish&& finish) {
  const std::int64_t part = scan_part(length, num_kv_heads, k), parts = (length + part - 1) / part;
  const std::int64_t room = std::min(k, part);
  Bars bars(std::size_t(num_kv_heads) * std::size_t(group));
  std::vector<Scored> partial(std::size_t(parts * num_kv_heads * group * room));  // [kv_head, part, query, room]
  std::vector<std::int64_t> counts(std::size_t(parts * num_kv_heads * group));
  const auto run = [&] {
    parallel_for(parts * num_kv_heads, threads, [&](std::int64_t task, int) {
      ScanScratch& scratch = ScanScratch::of_thread();
      const int h = int(task / parts);
      const std::int64_t start = task % parts * part;
      scan_rows(start, std::min(start + part, length), std::size_t(h) * std::size_t(group), group, k, bars, scratch,
                [&](std::int64_t row, std::int64_t count, float* scores) { score(h, row, count, scores); });
      for (int q = 0; q < group; ++q) {
        const std::vector<Scored>& chosen = scratch.best[std::size_t(q)].chosen();
        counts[std::size_t(task * group + q)] = std::int64_t(chosen.size());
        std::copy(chosen.begin(), chosen.end(), partial.begin() + (task * group + q) * room);
      }
    });
  };
  const auto task_of = [&](std::int64_t q, std::int64_t p) { return (q / group * parts + p) * group + q % group; };
  const auto too_few = [&](std::int64_t q) {
    std::int64_t total = 0;
    for (std::int64_t p = 0; p < parts; ++p) total += counts[std::size_t(task_of(q, p))];
    return total < k;
  };
  guess_bars(num_kv_heads, group, length, k, threads, bars, score);
  run();
  for (std::int64_t q = 0; q < std::int64_t(num_kv_heads) * group; ++q)
    if (too_few(q)) {  // the estimate of a bar was too high
      bars.lower();
      run();
      break;
    }
  parallel_for(std::int64_t(num_kv_heads) * group, threads, [&](std::int64_t q, int) {
    ScanScratch& scratch = ScanScratch::of_thread();
    if (scratch.best.empty()) scratch.best.resize(1);
    Best& all = scratch.best[0];
    all.reset(k);
    for (std::int64_t p = 0; p < parts; ++p) {
      const std::int64_t at = task_of(q, p);
      for (std::int64_t i = 0; i < counts[std::size_t(at)]; ++i) all.offer(partial[std::size_t(at * room + i)]);
    }
    finish(int(q), all);
  });
}

inline void write_matches(Best& best, std::int64_t k, std::int64_t* ids, float* scores) {
  const std::vector<Scored>& sorted = best.sorted();
  const std::int64_t count = std::int64_t(sorted.size());
  for (std::int64_t i = 0; i < k; ++i) {
    ids[i] = i < count ? std::int64_t(sorted[std::size_t(i)].id()) : -1;
    scores[i] = i < count ? sorted[std::size_t(i)].score() : -std::numeric_limits<float>::infinity();
  }
}

// The score of every key, [num_query_heads, length].
inline void all_scores(const PackedQueries& queries, int num_query_heads, const HeadRows& keys, int threads, float* scores) {
  const int group = num_query_heads / keys.num_kv_heads;
  const std::int64_t length = keys.length(), part = 8 * kScanRows, parts = (length + part - 1) / part;
  std::vector<std::int64_t> ids;
  const Slots slots = keys.slots(ids);
  parallel_for(parts * keys.num_kv_heads, threads, [&](std::int64_t task, int) {
    const int h = int(task / parts);
    const std::int64_t start = task % parts * part, count = std::min(part, length - start);
    kernels().dots(queries.heads(h * group, group), keys.rows(h, slots.part(start, count)),
                   scores + std::int64_t(h) * group * length + start, length);
  });
}

inline void scan(const PackedQueries& queries, int num_query_heads, const HeadRows& keys, std::int64_t k, int threads,
                 const Matches& out) {
  const int group = num_query_heads / keys.num_kv_heads;
  std::vector<std::int64_t> ids;
  const Slots slots = keys.slots(ids);
  scan_heads(
      keys.num_kv_heads, group, keys.length(), std::min(k, keys.length()), threads,
      [&](int h, std::int64_t row, std::int64_t count, float* scores) {
        kernels().dots(queries.heads(h * group, group), keys.rows(h, slots.part(row, count)), scores, kScanRows);
      },
      [&](int q, Best& best) { write_matches(best, k, out.ids + q * k, out.scores + q * k); });
}

// Codes of keys: key[j] is about centre[j] + scale[j] * (code - 128), in blocks of 16 rows, [num_blocks, width / 4, 16, 4].
struct HeadCodes {
  const std::uint8_t* data;
  std::int64_t head_stride;  // bytes
  const float* scale;        // [num_kv_heads, width]
};

constexpr int kLargestWeight = 127 * 128;

// Weights [num_query_heads, width]: sum of code * weight ranks keys as q.k does, up to rounding; centres add the same to each key.
inline std::vector<std::int16_t> code_weights(const float* queries, int num_query_heads, const HeadRows& keys,
                                              const HeadCodes& codes) {
  const int width = keys.width, group = num_query_heads / keys.num_kv_heads;
  std::vector<std::int16_t> weights(std::size_t(num_query_heads) * width);
  for (int q = 0; q < num_query_heads; ++q) {
    const float* query = queries + std::size_t(q) * width;
    const float* scale = codes.scale + std::size_t(q / group) * width;
    float largest = 0.0f;
    for (int i = 0; i < width; ++i) largest = std::max(largest, std::fabs(query[i] * scale[i]));
    if (largest == 0.0f) continue;
    for (int i = 0; i < width; ++i)
      weights[std::size_t(q) * width + i] = std::int16_t(std::lrint(query[i] * scale[i] / largest * kLargestWeight));
  }
  return weights;
}

// Scores the candidates by the keys of a query's head and keeps the best k.
inline void rescore(const Queries& query, int kv_head, const HeadRows& keys, const Slots& slots, std::int64_t k, Best& best) {
  ScanScratch& scratch = ScanScratch::of_thread();
  scratch.candidates = best.chosen();
  const std::int64_t count = std::int64_t(scratch.candidates.size());
  scratch.ids.clear();
  for (const Scored& candidate : scratch.candidates) scratch.ids.push_back(slots[candidate.id()]);
  scratch.scores.resize(std::size_t(count));
  kernels().dots(query, keys.rows(kv_head, {0, count, scratch.ids.data()}), scratch.scores.data(), count);
  best.reset(k);
  for (std::size_t i = 0; i < scratch.candidates.size(); ++i) best.offer(scratch.scores[i], scratch.candidates[i].id());
}

// The best num_candidates by codes, then the best k of them by the keys themselves. queries [num_query_heads, width]
inline void scan_codes(const float* queries, int num_query_heads, const HeadRows& keys, const HeadCodes& codes,
                       std::int64_t k, std::int64_t num_candidates, int threads, const Matches& out) {
  const int group = num_query_heads / keys.num_kv_heads, width = keys.width;
  const PackedQueries packed(queries, num_query_heads, width);
  const std::vector<std::int16_t> weights = code_weights(queries, num_query_heads, keys, codes);
  std::vector<std::int64_t> ids;
  const Slots slots = keys.slots(ids);
  scan_heads(
      keys.num_kv_heads, group, keys.length(), std::min(num_candidates, keys.length()), threads,
      [&](int h, std::int64_t row, std::int64_t count, float* scores) {
        kernels().code_dots(weights.data() + h * group * width, group, codes.data + h * codes.head_stride + row * width,
                            (count + 15) / 16, width, scores, kScanRows);
      },
      [&](int q, Best& best) {
        rescore(packed.heads(q, 1), q / group, keys, slots, std::min(k, keys.length()), best);
        write_matches(best, k, out.ids + q * k, out.scores + q * k);
      });
}

}  // namespace kvsift
