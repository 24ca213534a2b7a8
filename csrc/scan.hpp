// Exact search without an index: every key is scored, those of a KV head once for all queries of its group.
#pragma once

#include <atomic>
#include <cmath>
#include <memory>

#include "heads.hpp"
#include "parallel.hpp"
#include "top.hpp"

namespace kvsift {

struct Found {
  std::int64_t* ids;  // [num_query_heads, k], -1 where there are fewer than k keys
  float* scores;      // [num_query_heads, k], -inf there
};

constexpr std::int64_t kScanRows = 512;  // scored at a time

// What a thread needs for a task. Kept between calls: memory that is new each time costs more to clear than to search.
struct ScanScratch {
  std::vector<Best> best;
  std::vector<float> scores;
  std::vector<std::int64_t> ids;

  static ScanScratch& of_thread() {
    thread_local ScanScratch scratch;
    return scratch;
  }
};

// Of each query, a score that k rows are known to reach: others below it are not among the best k, wherever they are. Tasks
// tell each other, which saves work and changes no answer.
class Bars {
 public:
  explicit Bars(std::size_t num_queries) : count_(num_queries), bars_(new std::atomic<float>[num_queries]) { lower(); }
  void lower() {
    for (std::size_t q = 0; q < count_; ++q) bars_[q] = -std::numeric_limits<float>::infinity();
  }
  float of(std::size_t query) const { return bars_[query].load(std::memory_order_relaxed); }
  void raise(std::size_t query, float score) {
    float now = of(query);
    while (score > now && !bars_[query].compare_exchange_weak(now, score, std::memory_order_relaxed)) {
    }
  }

 private:
  std::size_t count_;
  std::unique_ptr<std::atomic<float>[]> bars_;
};

// Best k rows of [start, stop) for num_queries queries from first_query on, in scratch.best, less those below the bars;
// score(first_row, count, scores) fills [num_queries, kScanRows].
template <class Score>
void scan_rows(std::int64_t start, std::int64_t stop, std::size_t first_query, int num_queries, std::int64_t k, Bars& bars,
               ScanScratch& scratch, Score&& score) {
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  const Kernels& level = kernels();
  if (scratch.best.size() < std::size_t(num_queries)) scratch.best.resize(std::size_t(num_queries));
  for (int q = 0; q < num_queries; ++q) scratch.best[std::size_t(q)].reset(k);
  scratch.scores.resize(std::size_t(num_queries) * kScanRows);
  std::int32_t places[kScanRows];
  for (std::int64_t row = start; row < stop; row += kScanRows) {
    const std::int64_t count = std::min(kScanRows, stop - row);
    score(row, count, scratch.scores.data());
    for (int q = 0; q < num_queries; ++q) {
      const std::size_t query = first_query + std::size_t(q);
      const float* of_query = scratch.scores.data() + q * kScanRows;
      Best& kept = scratch.best[std::size_t(q)];
      // a score equal to the bar may get in, by its id
      const float bar = std::nextafter(bars.of(query), kNone);
      std::int64_t i = 0;
      if (bar == kNone) {
        for (; i < count && !kept.full(); ++i) kept.offer(of_query[i], std::uint32_t(row + i));
        if (i > 0) kept.shrink();
      }
      const float before = kept.threshold();
      const std::int64_t found = level.above(of_query + i, count - i, std::max(before, bar), places);
      for (std::int64_t j = 0; j < found; ++j) kept.offer(of_query[i + places[j]], std::uint32_t(row + i + places[j]));
      if (i > 0 || kept.threshold() > before) bars.raise(query, kept.threshold());
    }
  }
}

// Rows per task, a multiple of kScanRows: enough tasks for many threads, and so many more than k that each task's own
// best k do not cost more than the scan.
inline std::int64_t scan_part(std::int64_t length, int num_kv_heads, std::int64_t k) {
  const std::int64_t even = std::max(length * num_kv_heads / 32, 8 * k);
  return std::max((even + kScanRows - 1) / kScanRows, std::int64_t{8}) * kScanRows;
}

constexpr std::int64_t kSampledRows = 16;    // next to each other, one of 32 such blocks
constexpr std::int64_t kSampledFrom = 1024;  // k from which a sample saves more than it costs

// Sets bars that about one and a half times k rows reach, going by a sample: a search for thousands then takes in little
// that it drops again. A guess: whoever finds fewer than k must scan without them.
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
      for (auto each = first; each != first + count; ++each) *each = score_of(rank_of(*each));  // NaN has no order
      std::nth_element(first, first + rank, first + count, std::greater<float>());
      bars.raise(std::size_t(h) * std::size_t(group) + std::size_t(q), first[rank]);
    }
  });
}

// Calls score(kv_head, first_row, count, scores) as above for the group of each KV head, then finish(query_head, best) with
// the best k of each query head.
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
  const auto place = [&](std::int64_t q, std::int64_t p) { return (q / group * parts + p) * group + q % group; };
  const auto too_few = [&](std::int64_t q) {
    std::int64_t found = 0;
    for (std::int64_t p = 0; p < parts; ++p) found += counts[std::size_t(place(q, p))];
    return found < k;
  };
  guess_bars(num_kv_heads, group, length, k, threads, bars, score);
  run();
  for (std::int64_t q = 0; q < std::int64_t(num_kv_heads) * group; ++q)
    if (too_few(q)) {  // a bar was guessed too high
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
      const std::int64_t at = place(q, p);
      for (std::int64_t i = 0; i < counts[std::size_t(at)]; ++i) all.offer(partial[std::size_t(at * room + i)]);
    }
    finish(int(q), all);
  });
}

inline void write_found(Best& best, std::int64_t k, std::int64_t* ids, float* scores) {
  const std::vector<Scored>& sorted = best.sorted();
  const std::int64_t there = std::int64_t(sorted.size());
  for (std::int64_t i = 0; i < k; ++i) {
    ids[i] = i < there ? std::int64_t(sorted[std::size_t(i)].id()) : -1;
    scores[i] = i < there ? sorted[std::size_t(i)].score() : -std::numeric_limits<float>::infinity();
  }
}

inline void scan(const PackedQueries& queries, int num_query_heads, const HeadRows& keys, std::int64_t k, int threads,
                 const Found& out) {
  const int group = num_query_heads / keys.num_kv_heads;
  scan_heads(
      keys.num_kv_heads, group, keys.length, std::min(k, keys.length), threads,
      [&](int h, std::int64_t row, std::int64_t count, float* scores) {
        kernels().dots(queries.heads(h * group, group), keys.rows(h, row, count), scores, kScanRows);
      },
      [&](int q, Best& best) { write_found(best, k, out.ids + q * k, out.scores + q * k); });
}

// Codes of keys: key[j] is about centre[j] + scale[j] * (code - 128), in blocks of 16 rows, [num_blocks, width / 4, 16, 4].
struct HeadCodes {
  const std::uint8_t* data;
  std::int64_t head_stride;  // bytes
  const float* scale;        // [num_kv_heads, width]
};

constexpr int kLargestWeight = 127 * 128;

// q.k ranks keys as sum of code * weight does, up to rounding: centres add the same to every key. [num_heads, width]
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

// The best num_candidates by codes, then the best k of them by the keys themselves. queries [num_query_heads, width]
inline void scan_codes(const float* queries, int num_query_heads, const HeadRows& keys, const HeadCodes& codes,
                       std::int64_t k, std::int64_t num_candidates, int threads, const Found& out) {
  const int group = num_query_heads / keys.num_kv_heads, width = keys.width;
  const PackedQueries packed(queries, num_query_heads, width);
  const std::vector<std::int16_t> weights = code_weights(queries, num_query_heads, keys, codes);
  scan_heads(
      keys.num_kv_heads, group, keys.length, std::min(num_candidates, keys.length), threads,
      [&](int h, std::int64_t row, std::int64_t count, float* scores) {
        kernels().code_dots(weights.data() + h * group * width, group, codes.data + h * codes.head_stride + row * width,
                            (count + 15) / 16, width, scores, kScanRows);
      },
      [&](int q, Best& best) {
        ScanScratch& scratch = ScanScratch::of_thread();
        const std::vector<Scored>& candidates = best.chosen();
        scratch.ids.resize(candidates.size());
        scratch.scores.resize(candidates.size());
        for (std::size_t i = 0; i < candidates.size(); ++i) scratch.ids[i] = candidates[i].id();
        const std::int64_t count = std::int64_t(candidates.size());
        kernels().dots(packed.heads(q, 1), keys.named(q / group, scratch.ids.data(), count), scratch.scores.data(), count);
        best.reset(std::min(k, keys.length));
        for (std::int64_t i = 0; i < count; ++i)
          best.offer(scratch.scores[std::size_t(i)], std::uint32_t(scratch.ids[std::size_t(i)]));
        write_found(best, k, out.ids + q * k, out.scores + q * k);
      });
}

}  // namespace kvsift
