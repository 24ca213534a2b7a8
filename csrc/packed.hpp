// Products with packed weights, of any number of rows: inputs are rounded to 8 bits per block of 32, and a row gets the bits
// that it has alone.
#pragma once

#include <cstring>
#include <vector>

#include "product.hpp"

namespace kvsift {

// A matrix [num_out, num_in] of tiles (isa.hpp); outputs of the last tile that are past the end have scales of 0.
struct PackedMatrix {
  static constexpr int kTile = 16, kBlock = 32;

  const std::uint8_t* data;
  std::uint8_t table[16];
  std::int64_t num_out;
  int num_in, bits;
  bool affine, halves;

  int num_blocks() const { return num_in / kBlock; }
  std::int64_t tile_bytes() const { return std::int64_t(num_blocks()) * (bits * 64 + (halves ? 64 : 32) + (affine ? 32 : 0)); }
  std::int64_t num_tiles() const { return (num_out + kTile - 1) / kTile; }
  PackedTile tile(std::int64_t index) const { return {data + index * tile_bytes(), table, num_blocks(), bits, affine, halves}; }

  // One output's weights.
  void unpack(std::int64_t output, float* weights) const {
    const std::int64_t block_bytes = tile_bytes() / num_blocks(), lane = output % kTile;
    const std::uint8_t* block = data + output / kTile * tile_bytes();
    for (int b = 0; b < num_blocks(); ++b, block += block_bytes) {
      const std::uint8_t* const numbers = block + bits * 64 + 2 * lane;
      const auto half = [](const std::uint8_t* at) { return from_half(std::uint16_t(at[0] | at[1] << 8)); };
      const float minimum = affine ? half(numbers + (halves ? 64 : 32)) : 0.0f;
      for (int i = 0; i < kBlock; ++i) {
        const int j = i / 4 % bits, shift = i / 4 / bits * 4;
        const std::uint8_t byte = block[64 * j + 4 * lane + i % 4];
        const int code = bits == 8 ? byte : table[byte >> shift & 15];
        weights[b * kBlock + i] = half(numbers + (halves ? i / 16 * 32 : 0)) * float(code - 128) + minimum;
      }
    }
  }
};

// Rows of inputs in 8 bits, in groups of rows whose blocks take turns.
class PackedInputs {
 public:
  static constexpr int kGroup = 8;

  PackedInputs(int num_rows, int num_in)
      : num_rows_(num_rows), num_blocks_(num_in / PackedMatrix::kBlock), blocks_(std::size_t(num_rows) * num_blocks_) {}

  int num_rows() const { return num_rows_; }
  // Sets numbers of a row from number first on, both whole blocks.
  void set(int row, int first, const float* numbers, int count) {
    const int start = row / kGroup * kGroup, in_group = group_rows(start);
    InputBlock* const to = &blocks_[std::size_t(start) * num_blocks_ + row % kGroup];
    kernels().pack_inputs(numbers, count / PackedMatrix::kBlock, to + first / PackedMatrix::kBlock * in_group, in_group);
  }
  // out[row * stride + i] = product of a row and output i of the tile, for rows [first, first + count) of whole groups.
  void multiply(const PackedTile& tile, int first, int count, float* out, std::int64_t stride) const {
    for (int row = first; row < first + count; row += kGroup)
      kernels().packed_products(tile, &blocks_[std::size_t(row) * num_blocks_], group_rows(row), out + (row - first) * stride, stride);
  }

 private:
  int group_rows(int start) const { return std::min(kGroup, num_rows_ - start); }

  int num_rows_, num_blocks_;
  std::vector<InputBlock> blocks_;
};

// A product with packed matrices of one input, whose outputs follow each other; gated: with two of equal size. A task has
// some tiles of outputs and some rows.
template <class T>
class PackedProduct {
 public:
  static constexpr int kRows = 64;  // of a task, whose inputs fit in the second-level cache

  PackedProduct(const Product<T>& call, const std::vector<PackedMatrix>& parts, const PackedInputs& inputs, int threads)
      : call_(call), parts_(parts), inputs_(inputs), num_chunks_((call.num_rows + kRows - 1) / kRows) {
    for (std::size_t p = 0; p < (call.gated ? 1 : parts.size()); ++p) num_tiles_ += parts[p].num_tiles();
    constexpr std::int64_t kTaskBytes = 1 << 14, kTasksPerThread = 2;
    const std::int64_t even = num_tiles_ * num_chunks_ / (kTasksPerThread * threads);
    const std::int64_t wanted = std::max({even, kTaskBytes / parts[0].tile_bytes(), std::int64_t{1}});
    tiles_ = (wanted + 1) / 2 * 2;  // which begin at whole blocks of what follows
    num_tasks_ = num_chunks_ * ((num_tiles_ + tiles_ - 1) / tiles_);
  }

  std::int64_t num_tasks() const { return num_tasks_; }

  // Calls done(first, count) for outputs that have been written, one task after another.
  template <class Fn>
  void run(std::int64_t task, Fn&& done) const {
    const std::int64_t chunk = task % num_chunks_, first = task / num_chunks_ * tiles_, stop = std::min(first + tiles_, num_tiles_);
    const int row = int(chunk) * kRows, num_rows = std::min(kRows, call_.num_rows - row);
    const std::int64_t width = call_.gated ? call_.num_out / 2 : call_.num_out;
    Product<T> call = call_;
    call.num_rows = num_rows, call.out += row * width;
    if (call.residual != nullptr) call.residual += row * width;
    float products[kRows * PackedMatrix::kTile], factors[kRows * PackedMatrix::kTile];
    std::int64_t output = 0, tile = first, written = -1;
    std::size_t part = 0;
    for (; tile >= parts_[part].num_tiles(); ++part) tile -= parts_[part].num_tiles(), output += parts_[part].num_out;
    for (std::int64_t left = stop - first; left > 0; --left, ++tile) {
      if (tile == parts_[part].num_tiles()) output += parts_[part].num_out, tile = 0, ++part;
      const std::int64_t at = output + tile * PackedMatrix::kTile;
      const int count = int(std::min<std::int64_t>(PackedMatrix::kTile, parts_[part].num_out - tile * PackedMatrix::kTile));
      inputs_.multiply(parts_[part].tile(tile), row, num_rows, products, PackedMatrix::kTile);
      if (call.gated) inputs_.multiply(parts_[1].tile(tile), row, num_rows, factors, PackedMatrix::kTile);
      write_outputs(call, at, count, products, factors, PackedMatrix::kTile);
      if (written < 0) written = at;
      if (left == 1) done(written, at + count - written);
    }
  }

 private:
  const Product<T> call_;
  const std::vector<PackedMatrix>& parts_;
  const PackedInputs& inputs_;
  const std::int64_t num_chunks_;
  std::int64_t num_tiles_ = 0, tiles_ = 0, num_tasks_ = 0;
};

template <class T>
void multiply(const Product<T>& call, const std::vector<PackedMatrix>& parts, int threads) {
  PackedInputs inputs(call.num_rows, call.num_in);
  constexpr int kRows = 16;
  parallel_for((call.num_rows + kRows - 1) / kRows, threads, [&](std::int64_t task, int) {
    std::vector<float> x(static_cast<std::size_t>(call.num_in));
    for (int row = int(task) * kRows; row < std::min<int>(call.num_rows, int(task + 1) * kRows); ++row) {
      read_input(call, row, x.data());
      inputs.set(row, 0, x.data(), call.num_in);
    }
  });
  const PackedProduct<T> product(call, parts, inputs, threads);
  parallel_for(product.num_tasks(), threads, [&](std::int64_t task, int) { product.run(task, [](std::int64_t, std::int64_t) {}); });
}

}  // namespace kvsift
