// The choice of tokens by sketches for Python. Addresses are integers; the Python callers check the shapes.
#include <nanobind/nanobind.h>

#include "sketch.hpp"
#include "sketch_rows.hpp"

namespace nb = nanobind;
using namespace kvsift;
using Address = std::uintptr_t;

namespace {

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

// Rows of one sequence: their format, and their slots in a pool.
struct Sketches {
  int num_kv_heads;
  SketchFormat format;
  SlotTable table;
  Rotation rotation;
};

}  // namespace

void bind_sketch(nb::module_& m) {
  nb::class_<SketchFormat>(m, "SketchFormat")
      .def("__init__", [](SketchFormat* self, int bits, int head_dim, int page_size, int factors, int key_mean,
                          int value_mean, int scales, int width) {
        const int words = (head_dim + 31) / 32;
        new (self) SketchFormat{bits, words, head_dim, page_size, factors, key_mean, value_mean, scales, width};
      });
  nb::class_<Sketches>(m, "Sketches")
      .def("__init__", [](Sketches* self, const SketchFormat& format, int num_kv_heads, std::int64_t num_pages) {
        new (self) Sketches{num_kv_heads, format, SlotTable(num_pages), Rotation(format.head_dim)};
      })
      .def("__init__", [](Sketches* self, const SketchFormat& format, int num_kv_heads, std::int64_t num_pages, Address runs,
                          std::int64_t num_runs, std::int64_t num_slots, std::int64_t start) {
        new (self) Sketches{num_kv_heads, format, {at<const Run>(runs), num_runs, num_slots, start, num_pages}, Rotation(format.head_dim)};
      });
  m.def(
      "choose_sketched",
      [](const Sketches& sketches, Address queries, int num_query_heads, float scale, Address rows, std::int64_t row_stride,
         std::int64_t first, std::int64_t count, std::int64_t k, int num_selections, Address past, int threads, Address ids,
         Address output, Address lse) {
        const SketchRows in_pool{at<const std::uint8_t>(rows), row_stride, sketches.table, sketches.num_kv_heads,
                                 sketches.format};
        const PackedQueries packed(at<const float>(queries), num_query_heads, sketches.format.head_dim);
        choose_sketched({packed, scale, sketches.rotation, num_query_heads, in_pool, first, count, k, num_selections,
                         at<const float>(past), at<std::int64_t>(ids), at<float>(output), at<float>(lse)},
                        threads);
      },
      nb::call_guard<nb::gil_scoped_release>());
  m.def(
      "sketch_rows",
      [](const SketchFormat& format, bool bf16, Address keys, std::int64_t key_stride, Address values, std::int64_t value_stride,
         int num_heads, Address valid, std::int64_t num_pages, int threads, Address rows) {
        const Pages pages{num_heads, num_pages, key_stride, value_stride, at<const bool>(valid)};
        if (bf16)
          sketch_rows(format, at<const std::uint16_t>(keys), at<const std::uint16_t>(values), pages, threads, at<std::uint8_t>(rows));
        else
          sketch_rows(format, at<const float>(keys), at<const float>(values), pages, threads, at<std::uint8_t>(rows));
      },
      nb::call_guard<nb::gil_scoped_release>());
}
