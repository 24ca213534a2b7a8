// Keys, values and queries of one token's attention, at addresses that Python has checked.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "aligned.hpp"
#include "isa/isa.hpp"
#include "slots.hpp"

namespace kvsift {

inline int padded(int width) { return (width + kQueryPad - 1) / kQueryPad * kQueryPad; }

// Rows of one sequence in a pool [num_kv_heads, num_slots, width]; the heads of the pool are head_stride numbers apart, bytes
// where rows are coded.
struct HeadRows {
  const void* data;
  std::int64_t head_stride;
  const SlotTable& table;
  int num_kv_heads;
  int width;
  RowType type;

  std::int64_t length() const { return table.length(); }
  Slots slots(std::vector<std::int64_t>& ids) const { return table.range(0, length(), ids); }
  Rows rows(int kv_head, const Slots& slots) const {
    const std::int64_t* ids = slots.ids == nullptr ? nullptr : slots.ids + slots.start;
    const std::int64_t start = slots.ids == nullptr ? slots.start * row_bytes(type, width) : 0;
    return {static_cast<const char*>(data) + kv_head * head_stride * number_bytes(type) + start, ids, slots.count, width, type,
            slots.following};
  }
};

// Queries [num_query_heads, width] in the layout of the kernels; in bf16 too if that is exact for every number.
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

  // Zeros, to be set; is_bf16: to numbers that bf16 holds exactly.
  PackedQueries(int num_query_heads, int width, bool is_bf16)
      : stride_(padded(width)), is_bf16_(is_bf16), numbers_(std::size_t(num_query_heads) * stride_), bf16_(numbers_.size()) {}

  // Sets count numbers of a head, from number first on.
  void set(int head, int first, const float* numbers, int count) {
    const std::size_t at = std::size_t(head) * stride_ + std::size_t(first);
    std::memcpy(&numbers_[at], numbers, count * sizeof(float));
    for (int i = 0; i < count; ++i) {
      std::uint32_t bits;
      std::memcpy(&bits, numbers + i, 4);
      bf16_[at + i] = std::uint16_t(bits >> 16);
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
  Aligned<float> numbers_;
  Aligned<std::uint16_t> bf16_;
};

}  // namespace kvsift
