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

inline std::uint16_t to_half(float number) {
  std::uint32_t bits;
  std::memcpy(&bits, &number, 4);
  const std::uint32_t sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
  if (size > 0x7f800000) return std::uint16_t(sign | 0x7e00);
  if (size >= 0x47800000) return std::uint16_t(sign | 0x7c00);  // 65536 and more
  if (size < 0x38800000) {  // below 2^-14: one half has the same last bit as the smallest float16
    float shifted;
    std::memcpy(&shifted, &size, 4);
    shifted += 0.5f;
    std::memcpy(&bits, &shifted, 4);
    return std::uint16_t(sign | (bits - 0x3f000000));
  }
  return std::uint16_t(sign | (size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13);
}

inline float from_half(std::uint16_t half) {
  const std::uint32_t size = half & 0x7fff;
  const float number = float(size & 0x3ff) * 5.9604644775390625e-08f;  // of a subnormal
  std::uint32_t bits = (size << 13) + 0x38000000;
  if (size >= 0x7c00) bits += 0x38000000;
  if (size < 0x400) std::memcpy(&bits, &number, 4);
  bits |= std::uint32_t(half & 0x8000) << 16;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
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
