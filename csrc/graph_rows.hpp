// Keys as a graph reads them: scattered rows against one query. Rows come from memory in no order, so what counts is to
// ask for them early; plain loops that the compiler vectorises are then enough, once per instruction set.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>

namespace kvsift::graph {

constexpr std::uint32_t no_row = 0xffffffffu;

struct Rows {
  const void* data;  // [count, dim], bf16 bits or float32, rows next to each other
  std::int64_t count;
  int dim;
  bool bf16;
};

// scores[i] = query . rows[ids[i]]
using ScoreRows = void (*)(const Rows& rows, const float* query, const std::uint32_t* ids, std::int64_t num_ids,
                           float* scores);

namespace detail {

constexpr int ahead = 12;  // rows asked for before they are needed

inline float widen(float value) { return value; }
inline float widen(std::uint16_t bits) {
  const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof value);
  return value;
}

template <class T>
[[gnu::always_inline]] inline void prefetch_row(const T* row, int dim) {
  for (int column = 0; column < dim; column += static_cast<int>(64 / sizeof(T))) __builtin_prefetch(row + column);
}

template <class T>
[[gnu::always_inline]] inline float dot(const float* query, const T* row, int dim) {
  constexpr int lanes = 32;  // two chains of sums for the widest registers
  float sums[lanes] = {};
  int column = 0;
  for (; column + lanes <= dim; column += lanes)
    for (int lane = 0; lane < lanes; ++lane) sums[lane] += query[column + lane] * widen(row[column + lane]);
  float rest = 0;
  for (; column < dim; ++column) rest += query[column] * widen(row[column]);
  for (int width = lanes / 2; width; width /= 2)
    for (int lane = 0; lane < width; ++lane) sums[lane] += sums[lane + width];
  return sums[0] + rest;
}

template <class T>
[[gnu::always_inline]] inline void score_each(const Rows& rows, const float* query, const std::uint32_t* ids,
                                              std::int64_t num_ids, float* scores) {
  const T* data = static_cast<const T*>(rows.data);
  const std::int64_t dim = rows.dim;
  for (std::int64_t i = 0; i < num_ids && i < ahead; ++i) prefetch_row(data + ids[i] * dim, rows.dim);
  for (std::int64_t i = 0; i < num_ids; ++i) {
    if (i + ahead < num_ids) prefetch_row(data + ids[i + ahead] * dim, rows.dim);
    scores[i] = dot(query, data + ids[i] * dim, rows.dim);
  }
}

#define KVSIFT_SCORE_ROWS(name, attributes)                                                                      \
  attributes inline void name(const Rows& rows, const float* query, const std::uint32_t* ids, std::int64_t num, \
                              float* scores) {                                                                   \
    if (rows.bf16)                                                                                               \
      score_each<std::uint16_t>(rows, query, ids, num, scores);                                                  \
    else                                                                                                         \
      score_each<float>(rows, query, ids, num, scores);                                                          \
  }

KVSIFT_SCORE_ROWS(score_rows_generic, )
#if defined(__x86_64__)
KVSIFT_SCORE_ROWS(score_rows_avx2, [[gnu::target("avx2,fma")]])
KVSIFT_SCORE_ROWS(score_rows_avx512, [[gnu::target("avx512f,avx512bw,avx512vl,avx512dq,fma,prefer-vector-width=512")]])
#endif
#undef KVSIFT_SCORE_ROWS

}  // namespace detail

// The version for an instruction set that the processor is known to have.
inline ScoreRows score_rows(const std::string& level) {
#if defined(__x86_64__)
  if (level.rfind("avx512", 0) == 0) return detail::score_rows_avx512;
  if (level == "avx2") return detail::score_rows_avx2;
#endif
  (void)level;
  return detail::score_rows_generic;
}

}  // namespace kvsift::graph
