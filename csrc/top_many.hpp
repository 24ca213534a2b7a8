// Positions of a few of the largest of many scores.
#pragma once

#include <cmath>

#include "isa/isa.hpp"
#include "top_k.hpp"

namespace kvsift {

// As top_positions, but scores are only read twice if k is small beside their number. Keeps its memory.
class TopOfMany {
 public:
  void positions(const float* scores, std::int64_t count, std::int64_t k, std::int64_t* positions) {
    constexpr std::int64_t kSets = 8;  // for each of the k: more cost time, fewer let more scores pass
    if (k == 0) return;
    const std::int64_t run = count / (kSets * k);
    const std::int64_t passing = run < 2 ? 0 : pass(scores, count, run, k);
    if (passing < k) return top_positions(scores, count, k, positions);  // also if many are NaN
    kept_.clear();
    for (std::int64_t i = 0; i < passing; ++i) {
      const std::int32_t position = passed_[std::size_t(i)];
      kept_.emplace_back(scores[position], std::uint32_t(position));
    }
    order_ = kept_;
    const auto kth = order_.begin() + std::ptrdiff_t(k - 1);
    std::nth_element(order_.begin(), kth, order_.end(), std::greater<Scored>());
    for (const Scored& item : kept_)
      if (!(*kth > item)) *positions++ = item.id();
  }

 private:
  // Finds the scores that are no less than the k-th largest maximum of disjoint sets, as k scores at least are -> their
  // number, less than k if there is no such maximum.
  std::int64_t pass(const float* scores, std::int64_t count, std::int64_t run, std::int64_t k) {
    maxima_.resize(std::size_t(count / run) + 1);
    const std::int64_t num_sets = kernels().set_maxima(scores, count, run, maxima_.data());
    if (num_sets < k) return 0;
    const auto kth = maxima_.begin() + std::ptrdiff_t(k - 1);
    std::nth_element(maxima_.begin(), kth, maxima_.begin() + std::ptrdiff_t(num_sets), std::greater<float>());
    passed_.resize(std::size_t(count));
    return kernels().above(scores, count, std::nextafter(*kth, -std::numeric_limits<float>::infinity()), passed_.data());
  }

  std::vector<float> maxima_;
  std::vector<std::int32_t> passed_;
  std::vector<Scored> kept_, order_;
};

}  // namespace kvsift
