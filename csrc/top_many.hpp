// Positions of a few of the largest of many scores.
#pragma once

#include <cmath>

#include "isa/isa.hpp"
#include "top_k.hpp"

namespace kvsift {

// As top_positions, by counts of the scores that reach a threshold, which is halved in: no branch depends on a score. Keeps
// its memory.
class TopOfMany {
 public:
  void positions(const float* scores, std::int64_t count, std::int64_t k, std::int64_t* positions) {
    if (k == 0) return;
    passing_.resize(std::size_t(count));
    const std::int64_t num_passing = pass(scores, count, k);
    const float* among = scores;
    if (num_passing > 0) {
      kept_.resize(std::size_t(num_passing));
      for (std::int64_t i = 0; i < num_passing; ++i) kept_[std::size_t(i)] = scores[passing_[std::size_t(i)]];
      among = kept_.data(), count = num_passing;
    }
    const Threshold last = threshold(among, count, k);
    if (last.reaching < k) return top_positions(scores, count, k, positions);  // NaN reaches nothing
    chosen_.resize(std::size_t(count));
    kernels().above(among, count, below(last.score), chosen_.data());
    std::int64_t left = last.reaching == k ? k : k - kernels().count_above(among, count, last.score);  // of equal scores
    for (std::int64_t i = 0; i < last.reaching; ++i) {
      const std::int32_t at = chosen_[std::size_t(i)];
      if (last.reaching == k || among[at] > last.score || left-- > 0)
        *positions++ = num_passing > 0 ? passing_[std::size_t(at)] : at;
    }
  }

 private:
  struct Threshold {
    float score;
    std::int64_t reaching;  // scores that are no less
  };

  static float below(float score) { return std::nextafter(score, -std::numeric_limits<float>::infinity()); }

  // The k-th largest score, or a number above the next one; fewer than k reach -infinity if too many are NaN.
  static Threshold threshold(const float* scores, std::int64_t count, std::int64_t k) {
    std::uint32_t low = rank_of(-std::numeric_limits<float>::infinity()) + 1;
    std::uint32_t high = rank_of(std::numeric_limits<float>::infinity()) + 1;  // fewer than k reach it
    Threshold found{score_of(low), kernels().count_above(scores, count, below(score_of(low)))};
    while (found.reaching > k && high - low > 1) {
      const std::uint32_t middle = low + (high - low) / 2;
      const std::int64_t reaching = kernels().count_above(scores, count, score_of(middle - 1));
      if (reaching < k)
        high = middle;
      else
        low = middle, found = {score_of(middle), reaching};
    }
    return found;
  }

  // Finds the scores that are no less than the k-th largest maximum of disjoint sets, as k scores at least are -> their
  // number; 0 if there are too few sets for that.
  std::int64_t pass(const float* scores, std::int64_t count, std::int64_t k) {
    constexpr std::int64_t kSets = 4;  // for each of the k: more cost time, fewer let more scores pass
    const std::int64_t run = count / (kSets * k);
    if (run < 2) return 0;
    maxima_.resize(std::size_t(count / run) + 1);
    const std::int64_t num_sets = kernels().set_maxima(scores, count, run, maxima_.data());
    if (num_sets < k) return 0;
    const Threshold least = threshold(maxima_.data(), num_sets, k);
    return least.reaching < k ? 0 : kernels().above(scores, count, below(least.score), passing_.data());
  }

  std::vector<float> maxima_, kept_;
  std::vector<std::int32_t> passing_, chosen_;
};

}  // namespace kvsift
