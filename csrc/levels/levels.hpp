// The kernels of one instruction set, and which set is in use.
//
// Each set is compiled in a translation unit of its own, with wider instructions than the rest of the module. Such a unit
// uses no function of the standard library and none with external linkage but its table: an inline function shared with
// other units could be emitted there, chosen by the linker, and then run on a processor that lacks the instructions.
#pragma once

#include <cstdint>

namespace kvsift {

constexpr int kMaxHeadDim = 256;
constexpr int kMaxWidth = 2 * kMaxHeadDim;  // of a row: page summaries hold two numbers per channel
constexpr int kQueryPad = 32;               // numbers per query are padded with zeros to a multiple of this



// Rows of one KV head: all of [0, count) from base on, or those named by ids.
struct Rows {
  const void* base;
  const std::int64_t* ids;  // nullptr: consecutive
  std::int64_t count;
  int width;  // numbers per row, a multiple of 8
  bool bf16;  // else float32
};

// Queries of one group, packed: padded(width) numbers each.
struct Queries {
  const float* numbers;
  const std::uint16_t* bf16;  // the same in bf16 where that loses nothing, else nullptr
  int count;
};

// Online softmax over the rows seen so far; of each query.
struct Softmax {
  float* maximum;  // [count], -inf where nothing was seen
  float* sum;      // [count], of exp(logit - maximum)
  float* output;   // [count, padded(width)], the values' sum weighted by exp(logit - maximum)
};

struct Kernels {
  const char* name;
  // scores[q * stride + i] = queries[q] . rows[i]; a score does not depend on which rows and queries are asked together
  void (*dots)(const Queries& queries, const Rows& rows, float* scores, std::int64_t stride);
  // adds keys and values of the same rows; logit = scale * q.k, then softcap * tanh(logit / softcap) if softcap > 0.
  // coarse: the result is rounded to bf16 anyway, so weights may be too
  void (*attend)(const Queries& queries, const Rows& keys, const void* values, float scale, float softcap, bool coarse,
                 const Softmax& state);
  // scores of 16-row blocks of codes [num_blocks, width / 4, 16, 4] for weights[q * width + j], |weight| <= 16256:
  // scores[q * stride + i] = sum of code * weight, exact in 32 bits, then float
  void (*code_dots)(const std::int16_t* weights, int num_queries, const std::uint8_t* codes, std::int64_t num_blocks,
                    int width, float* scores, std::int64_t stride);
  // places of the scores above a threshold, ascending -> how many
  std::int64_t (*above)(const float* scores, std::int64_t count, float threshold, std::int32_t* places);
  // a sum over all of it, so that it is read
  std::uint64_t (*read)(const void* memory, std::int64_t bytes);
};

extern const Kernels kGeneric;
#if defined(KVSIFT_X86)
extern const Kernels kAvx2;
extern const Kernels kAvx512;
extern const Kernels kAvx512Bf16;
#endif

// Kernels that this processor can run, the plainest first; ends with nullptr.
const Kernels* const* usable_levels();
// In use now.
const Kernels& kernels();
void use_level(const Kernels& level);

}  // namespace kvsift
