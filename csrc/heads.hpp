// Keys, values and queries of one token's attention, as addresses that Python has checked.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "levels/levels.hpp"

namespace kvsift {

inline int padded(int width) { return (width + kQueryPad - 1) / kQueryPad * kQueryPad; }

// [num_kv_heads, length, width], rows one behind the other, heads anywhere.
struct HeadRows {
  const void* data;
  std::int64_t head_stride;  // numbers
  std::int64_t length;
  int num_kv_heads;
  int width;
  bool bf16;

  std::int64_t row_bytes() const { return std::int64_t(width) * (bf16 ? 2 : 4); }
  const void* head(int kv_head) const {
    return static_cast<const char*>(data) + kv_head * head_stride * (bf16 ? 2 : 4);
  }
  Rows rows(int kv_head, std::int64_t start, std::int64_t count) const {
    return {static_cast<const char*>(head(kv_head)) + start * row_bytes(), nullptr, count, width, bf16};
  }
  Rows named(int kv_head, const std::int64_t* ids, std::int64_t count) const {
    return {head(kv_head), ids, count, width, bf16};
  }
};

// Queries [num_query_heads, width] as kernels want them. Kept in bf16 too where no number of them needs more.
class PackedQueries {
 public:
  PackedQueries(const float* queries, int num_query_heads, int width) : stride_(padded(width)) {
    numbers_.assign(std::size_t(num_query_heads) * stride_, 0.0f);
    bf16_.assign(numbers_.size(), 0);
    for (int h = 0; h < num_query_heads; ++h)
      std::memcpy(&numbers_[std::size_t(h) * stride_], queries + std::size_t(h) * width, width * sizeof(float));
    for (std::size_t i = 0; i < numbers_.size(); ++i) {
      std::uint32_t bits;
      std::memcpy(&bits, &numbers_[i], 4);
      bf16_[i] = std::uint16_t(bits >> 16);
      is_bf16_ = is_bf16_ && (bits & 0xffff) == 0;
    }
  }

  Queries heads(int first, int count) const {
    const std::size_t at = std::size_t(first) * stride_;
    return {&numbers_[at], is_bf16_ ? &bf16_[at] : nullptr, count};
  }
  bool is_bf16() const { return is_bf16_; }
  int stride() const { return stride_; }

 private:
  int stride_;
  bool is_bf16_ = true;
  std::vector<float> numbers_;
  std::vector<std::uint16_t> bf16_;
};

}  // namespace kvsift
