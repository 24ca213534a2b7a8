// The k largest of many scores: larger first, then the lower id, in any order of arrival.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

namespace kvsift {

// Unsigned integers in the order of floats. NaN counts as -inf, because it has no order.
inline std::uint32_t rank_of(float score) {
  if (score != score) score = -std::numeric_limits<float>::infinity();
  score += 0.0f;  // -0 and 0 are the same score
  std::uint32_t bits;
  std::memcpy(&bits, &score, 4);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

inline float score_of(std::uint32_t rank) {
  const std::uint32_t bits = rank & 0x80000000u ? rank & 0x7fffffffu : ~rank;
  float score;
  std::memcpy(&score, &bits, 4);
  return score;
}

// A score and an id in one integer: the larger is the better.
class Scored {
 public:
  Scored() = default;
  Scored(float score, std::uint32_t id) : key_(std::uint64_t(rank_of(score)) << 32 | (0xffffffffu - id)) {}

  float score() const { return score_of(std::uint32_t(key_ >> 32)); }
  std::uint32_t id() const { return 0xffffffffu - std::uint32_t(key_); }
  std::uint32_t rank() const { return std::uint32_t(key_ >> 32); }
  int byte(int i) const { return int(key_ >> 8 * i & 0xff); }
  friend bool operator>(const Scored& a, const Scored& b) { return a.key_ > b.key_; }

 private:
  std::uint64_t key_ = 0;
};

// Best first; a radix sort by bytes if there are many, because it has no branches to mispredict.
inline void sort_best_first(std::vector<Scored>& scored, std::vector<Scored>& other) {
  if (scored.size() < 512) return std::sort(scored.begin(), scored.end(), std::greater<Scored>());
  std::array<std::uint32_t, 256> counts[8] = {};
  for (const Scored& item : scored)
    for (int i = 0; i < 8; ++i) ++counts[i][std::size_t(item.byte(i))];
  other.resize(scored.size());
  for (int i = 0; i < 8; ++i) {
    auto& count = counts[i];
    if (count[std::size_t(scored.front().byte(i))] == scored.size()) continue;  // the same in all
    std::uint32_t start = 0;
    for (std::size_t value = 256; value-- > 0;) start += std::exchange(count[value], start);
    for (const Scored& item : scored) other[count[std::size_t(item.byte(i))]++] = item;
    scored.swap(other);
  }
}

// Keeps the best k, in no order; 0 < k < scored.size(). By a histogram between the worst and the best: comparisons of scores
// in random order mispredict half of the branches.
inline void keep_best(std::vector<Scored>& scored, std::size_t k, std::vector<Scored>& tied) {
  constexpr std::uint32_t kBins = 1024;
  std::uint32_t lowest = 0xffffffffu, highest = 0;
  for (const Scored& item : scored) {
    lowest = std::min(lowest, item.rank());
    highest = std::max(highest, item.rank());
  }
  std::uint32_t num_bins = kBins;
  while (num_bins > 64 && num_bins > scored.size()) num_bins /= 2;
  int shift = 0;
  while ((highest - lowest) >> shift >= num_bins) ++shift;
  std::uint32_t bins[kBins];
  std::fill(bins, bins + num_bins, 0u);
  for (const Scored& item : scored) ++bins[(item.rank() - lowest) >> shift];
  std::size_t above = 0;  // in bins above the one where the k-th is
  std::uint32_t bin = num_bins - 1;
  while (above + bins[bin] < k) above += bins[bin--];
  tied.resize(bins[bin] + 1);  // one place for the last write, which may not count
  std::size_t kept = 0, equal = 0;
  for (const Scored& item : scored) {
    const std::uint32_t in = (item.rank() - lowest) >> shift;
    tied[equal] = item;
    equal += in == bin;
    scored[kept] = item;  // kept never passes the position that is read
    kept += in > bin;
  }
  const auto last = tied.begin() + std::ptrdiff_t(k - kept - 1);
  std::nth_element(tied.begin(), last, tied.begin() + std::ptrdiff_t(equal), std::greater<Scored>());
  scored.resize(kept);
  scored.insert(scored.end(), tied.begin(), last + 1);
}

// The best k of the scores offered so far; has memory for k and as many more that a later shrink drops.
class Best {
 public:
  // Drops all scores, keeps the memory.
  void reset(std::int64_t k) {
    k_ = std::size_t(k);
    room_ = k_ + std::max<std::size_t>(k_, 128);
    threshold_ = -std::numeric_limits<float>::infinity();
    kept_.clear();
    kept_.reserve(room_);
  }

  bool full() const { return kept_.size() >= k_; }
  // If ids are offered in ascending order, a score that is not above this is not among the best k.
  float threshold() const { return threshold_; }

  void offer(float score, std::uint32_t id) { offer(Scored(score, id)); }
  void offer(Scored item) {
    kept_.push_back(item);
    if (kept_.size() == room_) shrink();
  }

  // Drops all but the best k; the threshold is then the score of the k-th.
  void shrink() {
    if (kept_.size() < k_ || k_ == 0) return;
    if (kept_.size() > k_) keep_best(kept_, k_, tied_);
    threshold_ = std::min_element(kept_.begin(), kept_.end(), [](const Scored& a, const Scored& b) { return b > a; })->score();
  }

  // The best, in no order.
  const std::vector<Scored>& chosen() {
    shrink();
    return kept_;
  }
  // The best, in order.
  const std::vector<Scored>& sorted() {
    shrink();
    sort_best_first(kept_, tied_);
    return kept_;
  }

 private:
  std::size_t k_ = 0, room_ = 0;
  float threshold_ = -std::numeric_limits<float>::infinity();
  std::vector<Scored> kept_, tied_;
};

// Positions of the k largest of count scores, ascending; ties to the lower position. 0 <= k <= count.
inline void top_positions(const float* scores, std::int64_t count, std::int64_t k, std::int64_t* positions) {
  if (k == 0) return;
  constexpr int kBins = 2048;  // of the upper 11 bits of a rank
  std::vector<std::uint32_t> ranks(static_cast<std::size_t>(count)), tied;
  std::int64_t bins[kBins] = {};
  for (std::int64_t i = 0; i < count; ++i) {
    ranks[std::size_t(i)] = rank_of(scores[i]);
    ++bins[ranks[std::size_t(i)] >> 21];
  }
  std::int64_t above = 0;  // in bins above the one where the k-th is
  int bin = kBins - 1;
  while (above + bins[bin] < k) above += bins[bin--];
  for (std::uint32_t rank : ranks)
    if (int(rank >> 21) == bin) tied.push_back(rank);
  const auto kth = tied.begin() + std::ptrdiff_t(k - above - 1);
  std::nth_element(tied.begin(), kth, tied.end(), std::greater<std::uint32_t>());
  const std::uint32_t least = *kth;
  std::int64_t larger = above;
  for (std::uint32_t rank : tied) larger += rank > least;
  std::int64_t equal = k - larger;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::uint32_t rank = ranks[std::size_t(i)];
    if (rank > least || (rank == least && equal-- > 0)) *positions++ = i;
  }
}

}  // namespace kvsift
