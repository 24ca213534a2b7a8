// The kernels of one instruction set, and which set is in use.
//
// Each set is compiled in a translation unit of its own, with wider instructions than the rest of the module. Such a unit
// uses no function of the standard library and exports nothing but its table: the linker might choose its copy of an
// inline function for all units, and a processor without the instructions would then run it.
#pragma once

#include <cstdint>

namespace kvsift {

constexpr int kMaxHeadDim = 256;
constexpr int kMaxWidth = 2 * kMaxHeadDim;  // of a row: page summaries hold two numbers per channel
constexpr int kQueryPad = 32;               // queries are padded with zeros to a multiple of this many numbers

// Rows of one KV head: count consecutive ones from base on, or those at base + ids[i] * width.
struct Rows {
  const void* base;
  const std::int64_t* ids;  // nullptr: consecutive
  std::int64_t count;
  int width;                   // numbers per row, a multiple of 8
  bool bf16;                   // else float32
  std::int64_t following = 0;  // ids behind these, of rows that are read next
};

// Queries of one group, packed: padded(width) numbers each.
struct Queries {
  const float* numbers;
  const std::uint16_t* bf16;  // the same in bf16 where that is exact, else nullptr
  int count;
};

// Online softmax of each query over the rows attended so far.
struct Softmax {
  float* maximum;  // [count], -inf before the first row
  float* sum;      // [count], of exp(logit - maximum)
  float* output;   // [count, padded(width)], the sum of values weighted by exp(logit - maximum)
};

struct Kernels {
  const char* name;
  // scores[q * stride + i] = queries[q] . rows[i]; a score does not depend on the other rows and queries of a call
  void (*dots)(const Queries& queries, const Rows& rows, float* scores, std::int64_t stride);
  // attends keys and the values at the same ids (values: base of their rows) and adds them to the state.
  // logit = scale * q.k, then softcap * tanh(logit / softcap) if softcap > 0.
  // coarse: weights may be rounded to bf16, because the caller rounds the result to bf16
  void (*attend)(const Queries& queries, const Rows& keys, const void* values, float scale, float softcap, bool coarse,
                 const Softmax& state);
  // scores of 16-row blocks of codes [num_blocks, width / 4, 16, 4] for weights[q * width + j], |weight| <= 16256:
  // scores[q * stride + i] = sum of code * weight, exact in 32 bits, then float
  void (*code_dots)(const std::int16_t* weights, int num_queries, const std::uint8_t* codes, std::int64_t num_blocks,
                    int width, float* scores, std::int64_t stride);
  // positions of the scores above a threshold, ascending -> their number
  std::int64_t (*above)(const float* scores, std::int64_t count, float threshold, std::int32_t* positions);
  // a sum over all bytes: the compiler cannot leave out the read
  std::uint64_t (*read)(const void* memory, std::int64_t bytes);
};

extern const Kernels kGeneric;
#if defined(KVSIFT_X86)
extern const Kernels kAvx2;
extern const Kernels kAvx512;
extern const Kernels kAvx512Bf16;
#endif

// Kernels that this processor can run, the narrowest first; ends with nullptr.
const Kernels* const* usable_levels();
// The kernels in use.
const Kernels& kernels();
void use_level(const Kernels& level);

}  // namespace kvsift
