// Positions of a few of the largest of many scores.
#pragma once

#include <cmath>

#include "isa/isa.hpp"
#include "top_k.hpp"

namespace kvsift {

// As top_positions, by counts of the scores that reach a threshold, which is halved in between two that a sample says: no
// branch depends on a score. Keeps its memory.
class TopOfMany {
 public:
  void positions(const float* scores, std::int64_t count, std::int64_t k, std::int64_t* positions) {
    if (k == 0) return;
    const Bracket likely = sampled(scores, count, k);
    passing_.resize(std::size_t(count));
    const std::int64_t num_passing = kernels().above(scores, count, below(score_of(likely.low)), passing_.data());
    if (num_passing < k) return top_positions(scores, count, k, positions);  // seldom, or NaN, which reaches nothing
    kept_.resize(std::size_t(num_passing));
    for (std::int64_t i = 0; i < num_passing; ++i) kept_[std::size_t(i)] = scores[passing_[std::size_t(i)]];
    const Threshold last = threshold(kept_.data(), num_passing, k, likely);
    chosen_.resize(std::size_t(num_passing));
    const std::int64_t reaching = kernels().above(kept_.data(), num_passing, below(last.score), chosen_.data());
    std::int64_t left = reaching == k ? k : k - kernels().count_above(kept_.data(), num_passing, last.score);  // of equal scores
    for (std::int64_t i = 0; i < reaching; ++i) {
      const std::int32_t at = chosen_[std::size_t(i)];
      if (reaching == k || kept_[std::size_t(at)] > last.score || left-- > 0) *positions++ = passing_[std::size_t(at)];
    }
  }

 private:
  // Ranks (rank_of); at least k scores reach the lower one, and fewer the higher.
  struct Bracket {
    std::uint32_t low, high;
  };
  struct Threshold {
    float score;
    std::int64_t reaching;  // scores that are no less
  };
  static constexpr Bracket kAll{0x007fffffu + 1, 0xff800000u + 1};  // -infinity and above, more than infinity

  static float below(float score) { return std::nextafter(score, -std::numeric_limits<float>::infinity()); }
  static std::int64_t reaching(const float* scores, std::int64_t count, std::uint32_t rank) {
    return kernels().count_above(scores, count, below(score_of(rank)));
  }

  // The k-th largest score, or a number above the next one. At least k reach bracket.low.
  static Threshold threshold(const float* scores, std::int64_t count, std::int64_t k, Bracket bracket) {
    auto [low, high] = bracket;
    if (high < kAll.high && reaching(scores, count, high) >= k) low = high, high = kAll.high;
    Threshold found{score_of(low), reaching(scores, count, low)};
    while (found.reaching > k && high - low > 1) {
      const std::uint32_t middle = low + (high - low) / 2;
      const std::int64_t size = reaching(scores, count, middle);
      if (size < k)
        high = middle;
      else
        low = middle, found = {score_of(middle), size};
    }
    return found;
  }

  // Where the k-th largest score likely is: four deviations around its rank in a sample.
  Bracket sampled(const float* scores, std::int64_t count, std::int64_t k) {
    constexpr std::int64_t kSample = 512;
    if (count < 2 * kSample) return kAll;
    sample_.resize(kSample);
    const std::int64_t step = count / kSample;
    for (std::int64_t i = 0; i < kSample; ++i) sample_[std::size_t(i)] = scores[i * step];
    const std::int64_t rank = k * kSample / count, margin = 4 * std::int64_t(std::sqrt(double(rank))) + 8;
    Bracket likely = kAll;
    const auto at = [&](std::int64_t place) {
      const Threshold found = threshold(sample_.data(), kSample, place, kAll);
      return found.reaching < place ? kAll.low : rank_of(found.score);  // or it has NaN
    };
    if (rank + margin < kSample) likely.low = at(rank + margin);
    if (rank > margin) likely.high = std::max(at(rank - margin), likely.low);
    return likely;
  }

  std::vector<float> sample_, kept_;
  std::vector<std::int32_t> passing_, chosen_;
};

}  // namespace kvsift
