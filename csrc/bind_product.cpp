// A step of a decoder in Python, but for its attention. Addresses are integers; whoever calls has checked the shapes.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include "extremes.hpp"
#include "packed.hpp"
#include "rotary.hpp"

namespace nb = nanobind;
using namespace kvsift;
using Address = std::uintptr_t;

namespace {

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

template <class T>
void multiply_at(Address x, int num_rows, Address weight, std::int64_t num_out, int num_in, Address norm, float eps,
                 Address bias, Address residual, bool gated, int threads, Address out) {
  multiply<T>({at<T>(x), at<T>(weight), at<T>(norm), at<T>(bias), at<T>(residual), at<T>(out), num_out, num_rows, num_in, eps,
               gated},
              threads);
}

template <class T>
void multiply_packed_at(Address x, int num_rows, const std::vector<PackedMatrix>& parts, Address norm, float eps, Address bias,
                        Address residual, bool gated, int threads, Address out) {
  std::int64_t num_out = 0;
  for (const PackedMatrix& part : parts) num_out += part.num_out;
  multiply<T>({at<T>(x), nullptr, at<T>(norm), at<T>(bias), at<T>(residual), at<T>(out), num_out, num_rows, parts.at(0).num_in,
               eps, gated},
              parts, threads);
}

template <class T>
void unpack_at(const PackedMatrix& matrix, Address outputs, std::int64_t count, T* rows) {
  std::vector<float> weights(static_cast<std::size_t>(matrix.num_in));
  for (std::int64_t i = 0; i < count; ++i, rows += matrix.num_in) {
    matrix.unpack(at<std::int64_t>(outputs)[i], weights.data());
    for (int k = 0; k < matrix.num_in; ++k) store(rows + k, weights[std::size_t(k)]);
  }
}

}  // namespace

void bind_product(nb::module_& m) {
  const auto free_gil = nb::call_guard<nb::gil_scoped_release>();
  m.def(
      "multiply",
      [](bool bf16, Address x, int num_rows, Address weight, std::int64_t num_out, int num_in, Address norm, float eps,
         Address bias, Address residual, bool gated, int threads, Address out) {
        (bf16 ? multiply_at<std::uint16_t> : multiply_at<float>)(x, num_rows, weight, num_out, num_in, norm, eps, bias,
                                                                 residual, gated, threads, out);
      },
      free_gil);
  nb::class_<PackedMatrix>(m, "PackedMatrix")
      .def("__init__", [](PackedMatrix* self, Address data, nb::bytes table, std::int64_t num_out, int num_in, int bits,
                          bool affine, bool halves) {
        new (self) PackedMatrix{at<std::uint8_t>(data), {}, num_out, num_in, bits, affine, halves};
        std::memcpy(self->table, table.c_str(), std::min<std::size_t>(sizeof self->table, table.size()));
      })
      .def(
          "unpack",
          [](const PackedMatrix& self, bool bf16, Address outputs, std::int64_t count, Address rows) {
            if (bf16)
              unpack_at(self, outputs, count, at<std::uint16_t>(rows));
            else
              unpack_at(self, outputs, count, at<float>(rows));
          },
          free_gil);
  m.def(
      "multiply_packed",
      [](bool bf16, Address x, int num_rows, const std::vector<PackedMatrix>& parts, Address norm, float eps, Address bias,
         Address residual, bool gated, int threads, Address out) {
        (bf16 ? multiply_packed_at<std::uint16_t> : multiply_packed_at<float>)(x, num_rows, parts, norm, eps, bias, residual,
                                                                               gated, threads, out);
      },
      free_gil);
  m.def(
      "rotate",
      [](bool bf16, Address heads, int num_heads, int width, Address cos, Address sin, Address norm, float eps) {
        if (bf16)
          rotate<std::uint16_t>(at<std::uint16_t>(heads), num_heads, width, at<std::uint16_t>(cos), at<std::uint16_t>(sin),
                                at<std::uint16_t>(norm), eps);
        else
          rotate<float>(at<float>(heads), num_heads, width, at<float>(cos), at<float>(sin), at<float>(norm), eps);
      },
      free_gil);
  m.def(
      "page_extremes",
      [](bool bf16, Address keys, std::int64_t head_stride, int num_heads, Address valid, std::int64_t num_pages,
         int page_size, int width, Address rows) {
        for (int h = 0; h < num_heads; ++h) {
          const std::int64_t from = h * head_stride, to = h * num_pages * 2 * width;
          if (bf16)
            page_extremes(at<std::uint16_t>(keys) + from, at<bool>(valid), num_pages, page_size, width,
                          at<std::uint16_t>(rows) + to);
          else
            page_extremes(at<float>(keys) + from, at<bool>(valid), num_pages, page_size, width, at<float>(rows) + to);
        }
      },
      free_gil);
}
