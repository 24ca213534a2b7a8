// Single numbers of a tensor, bf16 or float32, rounded as torch rounds them.
#pragma once

#include <cstdint>
#include <cstring>

namespace kvsift {

inline float from_bf16(std::uint16_t half) {
  const std::uint32_t bits = std::uint32_t(half) << 16;
  float number;
  std::memcpy(&number, &bits, 4);
  return number;
}

inline std::uint16_t to_bf16(float number) {
  std::uint32_t bits;
  std::memcpy(&bits, &number, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return std::uint16_t(bits >> 16 | 0x40);  // NaN stays NaN
  return std::uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);  // to the nearest, ties to even
}

inline float load(const float* at) { return *at; }
inline float load(const std::uint16_t* at) { return from_bf16(*at); }
inline void store(float* at, float number) { *at = number; }
inline void store(std::uint16_t* at, float number) { *at = to_bf16(number); }

// The number after a conversion to T and back.
template <class T>
float rounded(float number) {
  T narrow;
  store(&narrow, number);
  return load(&narrow);
}

}  // namespace kvsift
