// Attention, page scores, search and memory for Python. Addresses are integers; the Python callers check the shapes.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "attention.hpp"
#include "coded_rows.hpp"
#include "memory.hpp"
#include "pages.hpp"
#include "scan.hpp"

namespace nb = nanobind;
using namespace kvsift;

namespace {

template <class T>
T* at(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

using Address = std::uintptr_t;

// Shape of a call, and the slots of the rows in their pool.
struct Shape {
  int num_query_heads, num_kv_heads, width;
  SlotTable table;
};

HeadRows rows_at(Address data, std::int64_t head_stride, const Shape& shape, int type) {
  return {at<const void>(data), head_stride, shape.table, shape.num_kv_heads, shape.width, RowType(type)};
}

// Queries of keys of a type: those of coded keys are rotated.
PackedQueries queries_at(Address queries, int num_queries, int width, int type) {
  const float* numbers = at<const float>(queries);
  if (RowType(type) != RowType::coded) return {numbers, num_queries, width};
  std::vector<float> rotated(numbers, numbers + std::size_t(num_queries) * width);
  Rotation(width).turn_rows(rotated.data(), num_queries);
  return {rotated.data(), num_queries, width};
}

// Calls fn(first, count, head) for rows of all heads, a task's at once.
template <class Fn>
void each_rows(int num_heads, std::int64_t count, int threads, Fn&& fn) {
  constexpr std::int64_t kRows = 256;
  const std::int64_t parts = (count + kRows - 1) / kRows;
  parallel_for(parts * num_heads, threads, [&](std::int64_t task, int) {
    const std::int64_t first = task % parts * kRows;
    fn(first, std::min(kRows, count - first), task / parts);
  });
}

}  // namespace

void bind_attention(nb::module_& m) {
  m.def("levels", [] {
    std::vector<std::string> names;
    for (auto level = usable_levels(); *level != nullptr; ++level) names.emplace_back((*level)->name);
    return names;
  });
  m.def("level", [] { return std::string(kernels().name); });
  m.def("use_level", [](const std::string& name) {
    for (auto level = usable_levels(); *level != nullptr; ++level)
      if (name == (*level)->name) return use_level(**level);
    throw std::invalid_argument("no such level: " + name);
  });

  nb::class_<Shape>(m, "Shape")
      .def("__init__", [](Shape* self, int num_query_heads, int num_kv_heads, int width, std::int64_t length) {
        new (self) Shape{num_query_heads, num_kv_heads, width, SlotTable(length)};
      })
      .def("__init__", [](Shape* self, int num_query_heads, int num_kv_heads, int width, std::int64_t length, Address runs,
                          std::int64_t num_runs, std::int64_t num_slots, std::int64_t start) {
        new (self) Shape{num_query_heads, num_kv_heads, width, {at<const Run>(runs), num_runs, num_slots, start, length}};
      });

  const auto free_gil = nb::call_guard<nb::gil_scoped_release>();

  m.def(
      "attend_dense",
      [](const Shape& shape, int num_tokens, Address queries, Address keys, std::int64_t key_stride, Address values,
         std::int64_t value_stride, int type, float scale, float softcap, bool coarse, int threads, Address output,
         Address lse, Address shares) {
        const int num_queries = shape.num_query_heads * num_tokens;
        const PackedQueries packed = queries_at(queries, num_queries, shape.width, type);
        attend_dense({packed, num_queries, rows_at(keys, key_stride, shape, type), rows_at(values, value_stride, shape, type),
                      scale, softcap, coarse, threads, {at<float>(output), at<float>(lse), at<float>(shares)}, num_tokens});
      },
      free_gil);

  m.def(
      "attend_units",
      [](const Shape& shape, Address queries, Address keys, std::int64_t key_stride, Address values,
         std::int64_t value_stride, int type, Address units, int num_lists, std::int64_t capacity, std::int64_t unit_size,
         const std::vector<Span>& spans, float scale, float softcap, bool coarse, int threads, Address output, Address lse) {
        const PackedQueries packed = queries_at(queries, shape.num_query_heads, shape.width, type);
        attend_units({packed, shape.num_query_heads, rows_at(keys, key_stride, shape, type),
                      rows_at(values, value_stride, shape, type), scale, softcap, coarse, threads,
                      {at<float>(output), at<float>(lse)}},
                     {at<const std::int64_t>(units), num_lists, capacity, unit_size}, spans);
      },
      free_gil);

  // Sum over heads of the shares that were estimated.
  m.def(
      "merge_estimate",
      [](bool bf16, Address output, Address lse, Address estimate, Address estimate_lse, std::int64_t num_heads, int width) {
        const auto merge = [&](auto* outputs) {
          double sum = 0;
          for (std::int64_t h = 0; h < num_heads; ++h)
            sum += merge_estimate(outputs + h * width, at<float>(lse)[h], at<const float>(estimate) + h * width,
                                  at<const float>(estimate_lse)[h], width);
          return sum;
        };
        return bf16 ? merge(at<std::uint16_t>(output)) : merge(at<float>(output));
      },
      free_gil);

  m.def(
      "page_scores",
      [](const Shape& shape, Address queries, Address rows, std::int64_t row_stride, int type, float scale, int threads,
         Address scores) {
        page_scores(at<const float>(queries), shape.num_query_heads, rows_at(rows, row_stride, shape, type), scale, threads,
                    at<float>(scores));
      },
      free_gil);

  m.def(
      "choose_pages",
      [](const Shape& shape, Address queries, Address rows, std::int64_t row_stride, int type, float scale, std::int64_t k,
         int num_selections, int threads, Address chosen) {
        choose_pages(at<const float>(queries), shape.num_query_heads, rows_at(rows, row_stride, shape, type), scale, k,
                     num_selections, threads, at<std::int64_t>(chosen));
      },
      free_gil);

  m.def(
      "scan",
      [](const Shape& shape, Address queries, Address keys, std::int64_t key_stride, int type, std::int64_t k, int threads,
         Address ids, Address scores) {
        const PackedQueries packed = queries_at(queries, shape.num_query_heads, shape.width, type);
        scan(packed, shape.num_query_heads, rows_at(keys, key_stride, shape, type), k, threads,
             {at<std::int64_t>(ids), at<float>(scores)});
      },
      free_gil);

  m.def(
      "all_scores",
      [](const Shape& shape, Address queries, Address keys, std::int64_t key_stride, int type, int threads, Address scores) {
        const PackedQueries packed = queries_at(queries, shape.num_query_heads, shape.width, type);
        all_scores(packed, shape.num_query_heads, rows_at(keys, key_stride, shape, type), threads, at<float>(scores));
      },
      free_gil);

  m.def(
      "scan_codes",
      [](const Shape& shape, Address queries, Address keys, std::int64_t key_stride, int type, Address codes,
         std::int64_t code_stride, Address code_scale, std::int64_t k, std::int64_t num_candidates, int threads, Address ids,
         Address scores) {
        scan_codes(at<const float>(queries), shape.num_query_heads, rows_at(keys, key_stride, shape, type),
                   {at<const std::uint8_t>(codes), code_stride, at<const float>(code_scale)}, k, num_candidates, threads,
                   {at<std::int64_t>(ids), at<float>(scores)});
      },
      free_gil);

  // vectors [num_heads, count, width] -> coded rows of the same shape; turned: rotated, as keys are
  m.def(
      "encode_rows",
      [](bool bf16, Address vectors, int num_heads, std::int64_t count, int width, bool turned, int threads, Address rows) {
        const Rotation rotation(width);
        each_rows(num_heads, count, threads, [&](std::int64_t first, std::int64_t some, std::int64_t head) {
          const std::int64_t row = head * count + first;
          std::int8_t* to = at<std::int8_t>(rows) + row * row_bytes(RowType::coded, width);
          const auto encode = [&](const auto* from) { encode_rows(from + row * width, some, width, turned ? &rotation : nullptr, to); };
          bf16 ? encode(at<const std::uint16_t>(vectors)) : encode(at<const float>(vectors));
        });
      },
      free_gil);
  // The inverse; the heads of the rows are head_stride bytes apart.
  m.def(
      "decode_rows",
      [](Address rows, std::int64_t head_stride, int num_heads, std::int64_t count, int width, bool turned, bool bf16, int threads,
         Address vectors) {
        const Rotation rotation(width);
        each_rows(num_heads, count, threads, [&](std::int64_t first, std::int64_t some, std::int64_t head) {
          const std::int8_t* from = at<const std::int8_t>(rows) + head * head_stride + first * row_bytes(RowType::coded, width);
          const auto decode = [&](auto* to) {
            decode_rows(from, some, width, turned ? &rotation : nullptr, to + (head * count + first) * width);
          };
          bf16 ? decode(at<std::uint16_t>(vectors)) : decode(at<float>(vectors));
        });
      },
      free_gil);

  m.def("advise_huge", [](Address data, std::int64_t bytes) { return advise_huge(at<void>(data), bytes); });
  m.def(
      "read_seconds",
      [](Address data, std::int64_t bytes, int threads) { return read_seconds(at<const void>(data), bytes, threads); },
      free_gil);
}
