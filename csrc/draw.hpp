// A token drawn from the logits of one sequence: as `draw` of engine/sampling.py draws it, in a fifth of the time.
//
// A token's number is (logit - best) / temperature + gumbel, gumbel = -log(-log(u)), u of the sequence's random number and
// the token; the largest number wins. Few tokens need it: the one with the number n wins against `least` only if
// -log(u) <= exp(scaled - least), and 1 - u <= -log(u), so that one exponential in float32 settles nearly all others.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "isa/isa.hpp"
#include "numbers.hpp"
#include "top_k.hpp"

namespace kvsift {

struct Sampler {
  double temperature;  // above 0
  std::uint64_t noise;
  double top_p;
  std::int64_t top_k;  // at least 1
  double min_p;
};

// The first of the logits that are the largest one, which is a number.
template <class T>
std::int64_t first_of(const T* logits, std::int64_t count, float largest) {
  constexpr std::int64_t kBlock = 512;  // of which the compiler makes vectors
  for (std::int64_t i = 0; i < count; i += kBlock) {
    const std::int64_t stop = std::min(count, i + kBlock);
    int found = 0;
    for (std::int64_t j = i; j < stop; ++j) found |= load(logits + j) == largest;
    if (found)
      for (std::int64_t j = i;; ++j)
        if (load(logits + j) == largest) return j;
  }
  return 0;
}

// The first token of the largest logit, and that logit: NaN if any is, and any token unless it is finite.
inline std::pair<std::int64_t, float> likeliest(const float* logits, std::int64_t count) {
  const float best = kernels().largest(logits, count);
  return {std::isfinite(best) ? first_of(logits, count, best) : 0, best};
}
inline std::pair<std::int64_t, float> likeliest(const std::uint16_t* logits, std::int64_t count) {
  const float best = kernels().largest_bf16(logits, count);
  return {std::isfinite(best) ? first_of(logits, count, best) : 0, best};
}

class Draw {
 public:
  Draw(const float* logits, std::int64_t count, const Sampler& sampler)
      : logits_(logits), count_(count), sampler_(sampler), best_(kernels().largest(logits, count)) {
    sampler_.top_k = std::min(sampler.top_k, count);
    noise_ = {sampler.noise, best_, float(1 / std::clamp(sampler.temperature, 1e-30, 1e37))};  // beyond, the draw is the same
  }

  // The token, and the largest logit: NaN if any is, and any token unless it is finite.
  std::pair<std::int64_t, float> run() {
    if (std::isfinite(best_)) {
      if (sampler_.top_p < 1 || sampler_.top_k < count_ || sampler_.min_p > 0)
        draw_from_likely();
      else
        draw_from_all();
    }
    return {winner_, best_};
  }

 private:
  double scaled(float logit) const { return (double(logit) - double(best_)) / sampler_.temperature; }

  double gumbel(std::int64_t token) const {
    return -std::log(-std::log((double(mixed_noise(sampler_.noise, std::uint64_t(token)) >> 11) + 0.5) / 0x1p53));
  }

  void offer(std::int64_t token) {
    const double number = scaled(logits_[token]) + gumbel(token);
    if (number > number_ || (number == number_ && token < winner_)) number_ = number, winner_ = token;
  }

  // Calls fn(token) for the tokens whose logit is above bound(), in ascending order.
  template <class Bound, class Fn>
  void each_above(Bound&& bound, Fn&& fn) const {
    std::int32_t positions[2 * kDrawBlock];
    for (std::int64_t first = 0; first < count_; first += kDrawBlock) {
      const std::int64_t found =
          kernels().above(logits_ + first, std::min<std::int64_t>(kDrawBlock, count_ - first), bound(), positions);
      for (std::int64_t i = 0; i < found; ++i) fn(first + positions[i]);
    }
  }

  void draw_from_all() {
    offer(first_of(logits_, count_, best_));
    std::int32_t positions[2 * kDrawBlock];
    for (std::int64_t first = 0; first < count_; first += kDrawBlock) {
      const std::int64_t found =
          kernels().could_win(logits_ + first, first, count_ - first, noise_, float(number_), positions);
      for (std::int64_t i = 0; i < found; ++i) offer(first + positions[i]);
    }
  }

  void draw_from_likely() {
    const double infinity = std::numeric_limits<double>::infinity();
    const bool of_all = sampler_.top_k == count_ && sampler_.min_p == 0;
    const double least = sampler_.min_p > 0 ? std::log(sampler_.min_p) : -infinity;
    // tokens that are less likely than this have together less than 1 - top_p
    double total = of_all ? kernels().sum_of_shares(logits_, count_, best_, noise_.inverse) : 0, bound = least;
    if (of_all) bound = std::log((1 - sampler_.top_p) * total / double(count_));
    bound = double(best_) + sampler_.temperature * bound;
    bound -= 1e-5 * (1 + std::abs(double(best_)) + std::abs(bound));
    const float lowest = bound > -std::numeric_limits<float>::max() ? float(bound) : -std::numeric_limits<float>::infinity();

    Best best;
    best.reset(sampler_.top_k);
    each_above([&] { return std::max(lowest, best.threshold()); },
               [&](std::int64_t token) { best.offer(logits_[token], std::uint32_t(token)); });
    std::vector<Scored> likely = best.chosen();
    if (!of_all)
      for (const Scored& item : likely)
        if (const double s = scaled(item.score()); s >= least) total += std::exp(s);
    const auto later = [](const Scored& a, const Scored& b) { return b > a; };
    std::make_heap(likely.begin(), likely.end(), later);
    for (double before = 0; !likely.empty(); likely.pop_back()) {
      std::pop_heap(likely.begin(), likely.end(), later);
      const double s = scaled(likely.back().score());
      if (s < least || (sampler_.top_p < 1 && before >= sampler_.top_p * total)) return;
      offer(likely.back().id());
      before += std::exp(s);
    }
  }

  const float* logits_;
  std::int64_t count_;
  Sampler sampler_;
  float best_;
  DrawNoise noise_;
  double number_ = -std::numeric_limits<double>::infinity();
  std::int64_t winner_ = 0;
};

}  // namespace kvsift
