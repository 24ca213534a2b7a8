// The least of the k largest of many scores.
#pragma once

#include <cmath>

#include "isa/isa.hpp"
#include "top_k.hpp"

namespace kvsift {

// By counts of the scores that are above a threshold, which is halved in: no branch depends on a score. Keeps its memory.
class TopOfMany {
 public:
  // A number that exactly k scores reach, the largest; of equal ones those in front. Scores are 0 or more, and of those that
  // are not chosen some may become negative: NaN, and equal ones behind. 0 < k <= count.
  float least(float* scores, std::int64_t count, std::int64_t k) {
    const std::int64_t num_passing = pass(scores, count, k);
    const float* among = scores;
    if (num_passing > 0) {
      kept_.resize(std::size_t(num_passing));
      for (std::int64_t i = 0; i < num_passing; ++i) kept_[std::size_t(i)] = scores[passing_[std::size_t(i)]];
      among = kept_.data();
    }
    const std::int64_t num_among = num_passing > 0 ? num_passing : count;
    const Threshold last = threshold(among, num_among, k);
    if (last.reaching < k) {  // NaN reaches nothing
      for (std::int64_t i = 0; i < count; ++i) scores[i] = scores[i] >= 0 ? scores[i] : -1.0f;
      return least(scores, count, k);
    }
    for (std::int64_t i = num_among, equal = last.reaching - k; equal > 0;)
      if (among[--i] == last.score) scores[num_passing > 0 ? passing_[std::size_t(i)] : i] = -2.0f, --equal;
    return last.score;
  }

 private:
  struct Threshold {
    float score;
    std::int64_t reaching;  // scores that are no less
  };

  static float below(float score) { return std::nextafter(score, -std::numeric_limits<float>::infinity()); }

  // The k-th largest score, or a number above the next one; fewer than k reach -infinity if too many are NaN.
  static Threshold threshold(const float* scores, std::int64_t count, std::int64_t k) {
    std::uint32_t low = rank_of(-1.0f), high = rank_of(std::numeric_limits<float>::infinity()) + 1;  // fewer than k reach it
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

  // Finds the scores that reach a threshold, as k scores at least do -> their number; 0 if there is none. A sample says which:
  // twice its deviation lower than where the k-th is likely.
  std::int64_t pass(const float* scores, std::int64_t count, std::int64_t k) {
    constexpr std::int64_t kSample = 1024;
    const std::int64_t expected = k * kSample / count, rank = expected + 4 * std::int64_t(std::sqrt(double(expected))) + 8;
    if (count < 2 * kSample || rank > kSample / 2) return 0;
    sample_.resize(kSample);
    const std::int64_t step = count / kSample;
    for (std::int64_t i = 0; i < kSample; ++i) sample_[std::size_t(i)] = scores[i * step];
    const Threshold bar = threshold(sample_.data(), kSample, rank);
    if (bar.reaching < rank) return 0;
    passing_.resize(std::size_t(count));
    const std::int64_t passing = kernels().above(scores, count, below(bar.score), passing_.data());
    return passing < k ? 0 : passing;
  }

  std::vector<float> sample_, kept_;
  std::vector<std::int32_t> passing_;
};

}  // namespace kvsift
