// What a layer of experts does besides its products: which experts a token gets, and the sum of what they give.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "numbers.hpp"

namespace kvsift {

// How logits of experts become weights of the best ones; as Routing of native/experts.py.
struct Routing {
  int top_k;
  bool sigmoid;     // weights are sigmoids of the logits; else their softmax
  bool normalised;  // those of the chosen sum to 1
  float factor;
  const float* bias;  // [num_experts], added for the choice alone; or nullptr
};

// The experts of a token, best first, and their weights, [top_k] both.
template <class T>
void route(const T* logits, int num_experts, const Routing& routing, std::int64_t* chosen, float* weights) {
  std::vector<float> all(static_cast<std::size_t>(num_experts));
  for (int e = 0; e < num_experts; ++e) all[std::size_t(e)] = load(logits + e);
  if (routing.sigmoid) {
    for (float& weight : all) weight = 1.0f / (1.0f + std::exp(-weight));
  } else {
    const float top = *std::max_element(all.begin(), all.end());
    float total = 0;
    for (float& weight : all) total += weight = std::exp(weight - top);
    for (float& weight : all) weight /= total;
  }
  std::vector<bool> taken(all.size());
  const auto rank = [&](int e) { return all[std::size_t(e)] + (routing.bias == nullptr ? 0.0f : routing.bias[e]); };
  float sum = 0;
  for (int k = 0; k < routing.top_k; ++k) {
    int best = -1;
    for (int e = 0; e < num_experts; ++e)  // of equal ones the first; NaN is never better
      if (!taken[std::size_t(e)] && (best < 0 || rank(e) > rank(best))) best = e;
    taken[std::size_t(best)] = true;
    chosen[k] = best;
    sum += weights[k] = all[std::size_t(best)];
  }
  for (int k = 0; k < routing.top_k; ++k) weights[k] = (routing.normalised ? weights[k] / (sum + 1e-20f) : weights[k]) * routing.factor;
}

// out = residual + sum over k of weights[k] * outputs[k], summed in float32; outputs [top_k] of width numbers each. out may be
// the residual, which may be nullptr.
template <class T>
void mix(const T* const* outputs, const float* weights, int top_k, int width, const T* residual, T* out) {
  for (int i = 0; i < width; ++i) {
    float total = 0;
    for (int k = 0; k < top_k; ++k) total += weights[k] * load(outputs[k] + i);
    store(out + i, residual == nullptr ? total : load(residual + i) + rounded<T>(total));
  }
}

}  // namespace kvsift
