// Attention, page scores, search and memory for Python. Addresses are integers; the Python callers check the shapes.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "attention.hpp"
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

HeadRows rows_at(Address data, std::int64_t head_stride, const Shape& shape, bool bf16) {
  return {at<const void>(data), head_stride, shape.table, shape.num_kv_heads, shape.width, bf16};
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
         std::int64_t value_stride, bool bf16, float scale, float softcap, bool coarse, int threads, Address output,
         Address lse, Address shares) {
        const int num_queries = shape.num_query_heads * num_tokens;
        const PackedQueries packed(at<const float>(queries), num_queries, shape.width);
        attend_dense({packed, num_queries, rows_at(keys, key_stride, shape, bf16), rows_at(values, value_stride, shape, bf16),
                      scale, softcap, coarse, threads, {at<float>(output), at<float>(lse), at<float>(shares)}, num_tokens});
      },
      free_gil);

  m.def(
      "attend_units",
      [](const Shape& shape, Address queries, Address keys, std::int64_t key_stride, Address values,
         std::int64_t value_stride, bool bf16, Address units, int num_lists, std::int64_t capacity, std::int64_t unit_size,
         const std::vector<Span>& spans, float scale, float softcap, bool coarse, int threads, Address output, Address lse) {
        const PackedQueries packed(at<const float>(queries), shape.num_query_heads, shape.width);
        attend_units({packed, shape.num_query_heads, rows_at(keys, key_stride, shape, bf16),
                      rows_at(values, value_stride, shape, bf16), scale, softcap, coarse, threads,
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
      [](const Shape& shape, Address queries, Address rows, std::int64_t row_stride, bool bf16, float scale, int threads,
         Address scores) {
        page_scores(at<const float>(queries), shape.num_query_heads, rows_at(rows, row_stride, shape, bf16), scale, threads,
                    at<float>(scores));
      },
      free_gil);

  m.def(
      "choose_pages",
      [](const Shape& shape, Address queries, Address rows, std::int64_t row_stride, bool bf16, float scale, std::int64_t k,
         int num_selections, int threads, Address chosen) {
        choose_pages(at<const float>(queries), shape.num_query_heads, rows_at(rows, row_stride, shape, bf16), scale, k,
                     num_selections, threads, at<std::int64_t>(chosen));
      },
      free_gil);

  m.def(
      "scan",
      [](const Shape& shape, Address queries, Address keys, std::int64_t key_stride, bool bf16, std::int64_t k, int threads,
         Address ids, Address scores) {
        const PackedQueries packed(at<const float>(queries), shape.num_query_heads, shape.width);
        scan(packed, shape.num_query_heads, rows_at(keys, key_stride, shape, bf16), k, threads,
             {at<std::int64_t>(ids), at<float>(scores)});
      },
      free_gil);

  m.def(
      "all_scores",
      [](const Shape& shape, Address queries, Address keys, std::int64_t key_stride, bool bf16, int threads, Address scores) {
        const PackedQueries packed(at<const float>(queries), shape.num_query_heads, shape.width);
        all_scores(packed, shape.num_query_heads, rows_at(keys, key_stride, shape, bf16), threads, at<float>(scores));
      },
      free_gil);

  m.def(
      "scan_codes",
      [](const Shape& shape, Address queries, Address keys, std::int64_t key_stride, bool bf16, Address codes,
         std::int64_t code_stride, Address code_scale, std::int64_t k, std::int64_t num_candidates, int threads, Address ids,
         Address scores) {
        scan_codes(at<const float>(queries), shape.num_query_heads, rows_at(keys, key_stride, shape, bf16),
                   {at<const std::uint8_t>(codes), code_stride, at<const float>(code_scale)}, k, num_candidates, threads,
                   {at<std::int64_t>(ids), at<float>(scores)});
      },
      free_gil);

  m.def("advise_huge", [](Address data, std::int64_t bytes) { return advise_huge(at<void>(data), bytes); });
  m.def(
      "read_seconds",
      [](Address data, std::int64_t bytes, int threads) { return read_seconds(at<const void>(data), bytes, threads); },
      free_gil);
}
