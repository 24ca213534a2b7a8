// Where the rows of one sequence are in a pool that several sequences share: runs of consecutive slots.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace kvsift {

struct Run {
  std::int64_t first;  // slot
  std::int64_t count;
};

// Slots of some rows, in the order of the rows: from start on, or ids[start], ids[start + 1], ...
struct Slots {
  std::int64_t start, count;
  const std::int64_t* ids;     // nullptr: consecutive
  std::int64_t following = 0;  // ids behind these, of rows that are read next

  std::int64_t operator[](std::int64_t i) const { return ids == nullptr ? start + i : ids[start + i]; }
  Slots part(std::int64_t first, std::int64_t size) const { return {start + first, size, ids, count - first - size}; }
};

// Slots of rows in constant time: a table by blocks, of the largest power of two at which all runs start.
class SlotTable {
 public:
  explicit SlotTable(std::int64_t length) : blocks_{0}, shift_(kShift), length_(length) {}

  // Of rows start to start + length - 1 of the runs, numbered from 0. Throws std::invalid_argument unless all runs are
  // inside a pool of num_slots, and hold so many rows.
  SlotTable(const Run* runs, std::int64_t num_runs, std::int64_t num_slots, std::int64_t start, std::int64_t length)
      : length_(length) {
    std::uint64_t starts = std::uint64_t{1} << kShift;
    std::int64_t row = -start;
    for (std::int64_t i = 0; i < num_runs; row += runs[i++].count) {
      if (runs[i].count < 1 || runs[i].first < 0 || runs[i].count > num_slots - runs[i].first)
        throw std::invalid_argument("run " + std::to_string(i) + " is " + std::to_string(runs[i].count) + " slots from " +
                                    std::to_string(runs[i].first) + " on; it must be 1 or more of the pool's " +
                                    std::to_string(num_slots) + ".");
      starts |= std::uint64_t(std::max<std::int64_t>(row, 0));
    }
    if (start < 0 || row < length)
      throw std::invalid_argument("the runs hold " + std::to_string(row + start) + " rows, not " + std::to_string(length) +
                                  " from row " + std::to_string(start) + " on.");
    while ((starts >> shift_ & 1) == 0) ++shift_;
    row = -start;
    for (std::int64_t i = 0; row < length; row += runs[i++].count)
      for (std::int64_t at = std::max<std::int64_t>(-row, 0); at < runs[i].count && row + at < length; at += block())
        blocks_.push_back(runs[i].first + at);
  }

  std::int64_t length() const { return length_; }

  // Slots of rows [start, stop); ids is the memory of those that are not consecutive.
  Slots range(std::int64_t start, std::int64_t stop, std::vector<std::int64_t>& ids) const {
    if (start >= stop) return {0, 0, nullptr};
    if (is_consecutive(start, stop)) return {slot(start), stop - start, nullptr};
    ids.resize(std::size_t(stop - start));
    write(start, stop, ids.data());
    return {0, stop - start, ids.data()};
  }

  // Writes the slots of rows [start, stop) -> end of what is written.
  std::int64_t* write(std::int64_t start, std::int64_t stop, std::int64_t* ids) const {
    const std::int64_t* const blocks = blocks_.data();
    const std::int64_t in_block = block() - 1;
    const int shift = shift_;  // in registers: for the compiler, ids may be any of them
    while (start < stop) {
      const std::int64_t end = std::min(stop, (start | in_block) + 1);
      for (std::int64_t at = blocks[start >> shift] + (start & in_block); start < end; ++start) *ids++ = at++;
    }
    return ids;
  }

  // Writes the slots of rows first + rows[i].
  void write_each(std::int64_t first, const std::int64_t* rows, std::int64_t count, std::int64_t* ids) const {
    const std::int64_t* const blocks = blocks_.data();
    const std::int64_t in_block = block() - 1;
    const int shift = shift_;
    for (std::int64_t i = 0; i < count; ++i) {
      const std::int64_t row = first + rows[i];
      ids[i] = blocks[row >> shift] + (row & in_block);
    }
  }

 private:
  static constexpr int kShift = 62;  // of one run: one block holds all rows

  std::int64_t block() const { return std::int64_t{1} << shift_; }
  std::int64_t slot(std::int64_t row) const { return blocks_[std::size_t(row >> shift_)] + (row & (block() - 1)); }
  bool is_consecutive(std::int64_t start, std::int64_t stop) const {
    for (std::int64_t i = start >> shift_; i < (stop - 1) >> shift_; ++i)
      if (blocks_[std::size_t(i) + 1] != blocks_[std::size_t(i)] + block()) return false;
    return true;
  }

  std::vector<std::int64_t> blocks_;
  int shift_ = 0;
  std::int64_t length_;
};

}  // namespace kvsift
