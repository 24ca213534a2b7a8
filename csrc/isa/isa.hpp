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

// The numbers of a row; coded: codes from -127 to 127 in a byte each, and behind them a scale in float32, number = scale * code.
enum class RowType { float32, bf16, coded };

constexpr RowType plain(bool bf16) { return bf16 ? RowType::bf16 : RowType::float32; }
constexpr int kScaleBytes = 4;
constexpr int number_bytes(RowType type) { return type == RowType::coded ? 1 : type == RowType::bf16 ? 2 : 4; }
constexpr int row_bytes(RowType type, int width) {
  return width * number_bytes(type) + (type == RowType::coded ? kScaleBytes : 0);
}

// Rows of one KV head: count consecutive ones from base on, or number ids[i] from there.
struct Rows {
  const void* base;
  const std::int64_t* ids;  // nullptr: consecutive
  std::int64_t count;
  int width;  // numbers per row, a multiple of 8
  RowType type;
  std::int64_t following = 0;  // ids behind these, of rows that are read next
};

// Queries of one group, packed: padded(width) numbers each.
struct Queries {
  const float* numbers;
  const std::uint16_t* bf16;  // the same in bf16 where that is exact, else nullptr
  int count;
  const std::int64_t* unseen = nullptr;  // [count], rows at the end that a query does not attend; nullptr: none
};

constexpr int kMostAttending = 16;  // queries of one call of attend


// Online softmax of each query over the rows attended so far.
struct Softmax {
  float* maximum;  // [count], -inf before the first row
  float* sum;      // [count], of exp(logit - maximum)
  float* output;   // [count, padded(width)], the sum of values weighted by exp(logit - maximum)
  // Where weights are asked for, by page of 16 rows: sums of exp(logit - reference), a reference for each block of 64 rows.
  // Of query q from number q * page_stride on; else nullptr.
  float* page_sums = nullptr;
  float* references = nullptr;  // of query q from number q * page_stride / 4 on
  std::int64_t page_stride = 0;
};

constexpr int kSketchTokens = 1024;                // of a block, at most
constexpr int kSketchPages = kSketchTokens / 16;  // of a block, at most; a page has a multiple of 16 tokens
constexpr int kRestPages = 128;                   // of a call of sketch_rest, at most

// Where the parts of a row of a sketch are: SketchLayout of native/sketch_format.py.
struct SketchFormat {
  int bits, words, head_dim, page_size;
  int factors, key_mean, value_mean, scales, width;  // bytes
};

// Logarithm of a weight, to the base of 2: factor * (sum of codes * sum + offset - factor * variance) + mean. Of 4 queries.
struct SketchFactors {
  float sum[4], offset[4], variance[4];
  float mean[4];  // of the product of mean key and query, both whole numbers
};

// At most 4 queries.
struct SketchQueries {
  const std::uint8_t* tables;    // [words, 2, count, 4, 16] on a cache line, at most 63: of 4 channels each, by the bits of their codes
  const std::int16_t* numbers;   // [count, 2, half], for a mean key: of even channels, then of odd ones
  const std::int8_t* bytes;      // [count, 2, half], a 258th of numbers, for mean keys
  const SketchFactors* factors;
  int count;

  // Numbers of even or of odd channels, filled up with zeros to cache lines of bytes.
  static constexpr int half(int words) { return (words + 3) / 4 * 64; }
  // Where the table of nibble n of a code is: bytes of a word in a row, by their lower nibbles first.
  static constexpr int table(int n, int q, int count) { return ((n / 8 * 2 + n % 2) * count + q) * 4 + n % 8 / 2; }
};

// Pages of one KV head.
struct SketchBlock {
  const std::uint8_t* const* rows;  // [2 * num_pages + 4]: the block's, then those that are read next
  int num_pages;
  int first, stop;  // tokens of the block that are candidates; the others have no weight
};

// Weights of a block: 2^(logarithm - reference).
struct SketchWeights {
  std::uint16_t* weights;  // bf16 [count, tokens], rows stride numbers apart; each strip of 16 in order of weight_position
  std::int64_t stride;
  const float* references;  // [count]
  float* sums;              // [count], of the block
  float* value_scales;      // [num_pages], of the mean values
};

// What is left of the weights of some pages, of at most 4 queries, and the sums that it is added to.
struct SketchRest {
  const std::uint16_t* weights;  // as SketchWeights
  std::int64_t stride;
  const float* value_scales;  // [kRestPages], of the mean values; any number behind the last page
  float* sums;                // [count], of weights
  float* values;              // [count, padded(head_dim)], of mean values, rows values_stride numbers apart
  int values_stride;
};

// Where the weight of a token of a strip is.
static inline constexpr int weight_position(int token) { return token % 8 * 2 + token / 8; }

// 16 outputs of a matrix of packed weights. Of each block of 32 inputs it has codes [bits, 16 outputs, 4 bytes], then scales
// [16] in float16 (halves: [2, 16], of 16 inputs each), and if it is affine minima [16]:
//   weight = scale * (code - 128) + minimum.
// Four bytes are the codes of four consecutive inputs. Of 4 bits the low ones are for the first 16 inputs of the block, the
// high ones for the others, and the table has their codes.
struct PackedTile {
  const std::uint8_t* blocks;
  const std::uint8_t* table;  // [16]
  int num_blocks, bits;
  bool affine, halves;
};

// 32 inputs in 8 bits: number = scale * code.
struct alignas(64) InputBlock {
  std::int32_t codes[8];  // of four inputs each
  float scale, sum;       // sum of the numbers
  std::int32_t starts[3]; // -128 times the sum of the codes: of the first 16, of the others, of all
};

// Where the outputs of a product go: rows of `width` numbers, all of one type.
struct Outputs {
  const void *bias, *residual;  // [width], gated [2 * width]; [rows, width]; nullptr: none
  void* out;                    // [rows, width]
  std::int64_t width;
  bool bf16;  // else float32
  bool gelu;  // of gates: GELU by tanh, else silu
};

constexpr int kDrawBlock = 256;  // tokens of one call of could_win

// What tokens are drawn by: see draw.hpp.
struct DrawNoise {
  std::uint64_t number;  // the sequence's random one
  float best, inverse;   // the largest logit; 1 / temperature
};

// 64 random bits of a token (SplitMix64).
static inline std::uint64_t mixed_noise(std::uint64_t number, std::uint64_t token) {
  std::uint64_t mixed = number + (token + 1) * 0x9e3779b97f4a7c15u;
  mixed = (mixed ^ mixed >> 30) * 0xbf58476d1ce4e5b9u;
  mixed = (mixed ^ mixed >> 27) * 0x94d049bb133111ebu;
  return mixed ^ mixed >> 31;
}

struct Kernels {
  const char* name;
  // scores[q * stride + i] = queries[q] . rows[i]; a score does not depend on the other rows and queries of a call
  void (*dots)(const Queries& queries, const Rows& rows, float* scores, std::int64_t stride);
  // attends keys and the values at the same ids (values: base of their rows) and adds them to the state.
  // logit = scale * q.k, then softcap * tanh(logit / softcap) if softcap > 0.
  // coarse: weights may be rounded to bf16, because the caller rounds the result to bf16
  // Queries are rounded to 16 bits for coded keys, and weights for coded values.
  // At most kMostAttending queries; the result of a query does not depend on the others.
  void (*attend)(const Queries& queries, const Rows& keys, const void* values, float scale, float softcap, bool coarse,
                 const Softmax& state);
  // scores of 16-row blocks of codes [num_blocks, width / 4, 16, 4] for weights[q * width + j], |weight| <= 16256:
  // scores[q * stride + i] = sum of code * weight, exact in 32 bits, then float
  void (*code_dots)(const std::int16_t* weights, int num_queries, const std::uint8_t* codes, std::int64_t num_blocks,
                    int width, float* scores, std::int64_t stride);
  // positions of the scores above a threshold, ascending -> their number
  std::int64_t (*above)(const float* scores, std::int64_t count, float threshold, std::int32_t* positions);
  // number of the scores above a threshold
  std::int64_t (*count_above)(const float* scores, std::int64_t count, float threshold);
  // a sum over all bytes: the compiler cannot leave out the read
  std::uint64_t (*read)(const void* memory, std::int64_t bytes);
  // the largest logarithm of a candidate of a block, to the base of 2; -inf: there is none
  void (*sketch_maxima)(const SketchQueries& queries, const SketchFormat& format, const SketchBlock& block, float* maxima);
  // weights of the tokens of a block; those that are no candidates get 2^-126
  void (*sketch_weights)(const SketchQueries& queries, const SketchFormat& format, const SketchBlock& block,
                         const SketchWeights& out);
  // votes[i] = sum over queries of factors[q] * weights[q * stride + i], weights in bf16; count is a multiple of 16
  void (*sketch_votes)(const std::uint16_t* weights, std::int64_t stride, const float* factors, int num_queries, int count,
                       float* votes);
  // adds up what is left of the weights of some pages, and their mean values; rows as in SketchBlock
  void (*sketch_rest)(const SketchFormat& format, const std::uint8_t* const* rows, int num_pages, int num_queries,
                      const SketchRest& rest);
  // out[r * stride + i] = product of row r and output i of the tile; block b of row r is x[b * num_rows + r]. A product does
  // not depend on the other rows, nor on the instruction set
  void (*packed_products)(const PackedTile& tile, const InputBlock* x, int num_rows, float* out, std::int64_t stride);
  // block b, of the numbers from x + 32 * b on, is blocks[b * apart]
  void (*pack_inputs)(const float* x, int num_blocks, InputBlock* blocks, int apart);
  // Outputs [first, first + count) of some rows, from their products, rows stride numbers apart: the bias is added, with
  // factors silu or GELU of that is multiplied by them (with the bias of the second half), the residual is added
  void (*finish)(const Outputs& to, int num_rows, std::int64_t first, std::int64_t count, const float* products,
                 const float* factors, std::int64_t stride);
  // the largest of some logits; NaN if any is
  float (*largest)(const float* logits, std::int64_t count);
  float (*largest_bf16)(const std::uint16_t* logits, std::int64_t count);
  // the sum of exp((logit - best) * inverse), best the largest of all
  double (*sum_of_shares)(const float* logits, std::int64_t count, float best, float inverse);
  // of at most kDrawBlock tokens from number `first` on, positions of those whose number may be above least -> how many
  std::int64_t (*could_win)(const float* logits, std::int64_t first, std::int64_t count, const DrawNoise& noise, float least,
                            std::int32_t* positions);
  // sets logits whose bit is 0 to -inf
  void (*exclude)(float* logits, std::int64_t count, const std::uint32_t* may);
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
