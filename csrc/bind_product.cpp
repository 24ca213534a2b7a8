// A step of a decoder in Python, but for its attention. Addresses are integers; whoever calls has checked the shapes.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include "draw.hpp"
#include "experts.hpp"
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
void multiply_at(Address x, int num_rows, Address weight, std::int64_t num_out, int num_in, const Norm& norm,
                 Address bias, Address residual, bool gated, bool gelu, int threads, Address out) {
  multiply<T>({at<T>(x), at<T>(weight), norm, at<T>(bias), at<T>(residual), at<T>(out), num_out, num_rows, num_in, gated, gelu},
              threads);
}

template <class T>
void multiply_packed_at(Address x, int num_rows, const std::vector<PackedMatrix>& parts, const Norm& norm, Address bias,
                        Address residual, bool gated, bool gelu, int threads, Address out) {
  std::int64_t num_out = 0;
  for (const PackedMatrix& part : parts) num_out += part.num_out;
  multiply<T>({at<T>(x), nullptr, norm, at<T>(bias), at<T>(residual), at<T>(out), num_out, num_rows, parts.at(0).num_in, gated,
               gelu},
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

template <class T>
void normalise_at(const T* x, int num_rows, int width, const Norm& norm, const T* residual, T* out) {
  std::vector<float> normal(static_cast<std::size_t>(width));
  for (int row = 0; row < num_rows; ++row, x += width, out += width) {
    add_normalised(x, norm, width, residual, normal.data(), out);
    if (residual != nullptr) residual += width;
  }
}

template <class T>
void route_at(const T* logits, int num_rows, int num_experts, const Routing& routing, std::int64_t* chosen, float* weights) {
  for (int row = 0; row < num_rows; ++row, logits += num_experts, chosen += routing.top_k, weights += routing.top_k)
    route(logits, num_experts, routing, chosen, weights);
}

template <class T>
void mix_at(const T* outputs, const float* weights, int num_rows, int top_k, int width, const T* residual, T* out) {
  std::vector<const T*> rows(static_cast<std::size_t>(top_k));
  for (int row = 0; row < num_rows; ++row, weights += top_k, out += width) {
    for (const T*& each : rows) each = outputs, outputs += width;
    mix(rows.data(), weights, top_k, width, residual, out);
    if (residual != nullptr) residual += width;
  }
}

}  // namespace

void bind_product(nb::module_& m) {
  const auto free_gil = nb::call_guard<nb::gil_scoped_release>();
  m.def(
      "multiply",
      [](bool bf16, Address x, int num_rows, Address weight, std::int64_t num_out, int num_in, Address norm, float eps,
         float offset, Address bias, Address residual, bool gated, bool gelu, int threads, Address out) {
        (bf16 ? multiply_at<std::uint16_t> : multiply_at<float>)(x, num_rows, weight, num_out, num_in,
                                                                 {at<void>(norm), eps, offset}, bias, residual, gated, gelu,
                                                                 threads, out);
      },
      free_gil);
  m.def(
      "normalise",
      [](bool bf16, Address x, int num_rows, int width, Address weight, float eps, float offset, Address residual, Address out) {
        const Norm norm{at<void>(weight), eps, offset};
        if (bf16)
          normalise_at(at<std::uint16_t>(x), num_rows, width, norm, at<std::uint16_t>(residual), at<std::uint16_t>(out));
        else
          normalise_at(at<float>(x), num_rows, width, norm, at<float>(residual), at<float>(out));
      },
      free_gil);
  m.def(
      "route",
      [](bool bf16, Address logits, int num_rows, int num_experts, int top_k, bool sigmoid, bool normalised, float factor,
         Address bias, Address chosen, Address weights) {
        const Routing routing{top_k, sigmoid, normalised, factor, at<float>(bias)};
        if (bf16)
          route_at(at<std::uint16_t>(logits), num_rows, num_experts, routing, at<std::int64_t>(chosen), at<float>(weights));
        else
          route_at(at<float>(logits), num_rows, num_experts, routing, at<std::int64_t>(chosen), at<float>(weights));
      },
      free_gil);
  m.def(
      "mix",
      [](bool bf16, Address outputs, Address weights, int num_rows, int top_k, int width, Address residual, Address out) {
        if (bf16)
          mix_at(at<std::uint16_t>(outputs), at<float>(weights), num_rows, top_k, width, at<std::uint16_t>(residual),
                 at<std::uint16_t>(out));
        else
          mix_at(at<float>(outputs), at<float>(weights), num_rows, top_k, width, at<float>(residual), at<float>(out));
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
      [](bool bf16, Address x, int num_rows, const std::vector<PackedMatrix>& parts, Address norm, float eps, float offset,
         Address bias, Address residual, bool gated, bool gelu, int threads, Address out) {
        (bf16 ? multiply_packed_at<std::uint16_t> : multiply_packed_at<float>)(x, num_rows, parts, {at<void>(norm), eps, offset},
                                                                               bias, residual, gated, gelu, threads, out);
      },
      free_gil);
  m.def(
      "rotate",
      [](bool bf16, Address heads, int num_heads, int width, int rotated, Address cos, Address sin, Address norm, float eps, float offset) {
        const Norm of_heads{at<void>(norm), eps, offset};
        if (bf16)
          rotate(at<std::uint16_t>(heads), num_heads, width, rotated, at<std::uint16_t>(cos), at<std::uint16_t>(sin), of_heads);
        else
          rotate(at<float>(heads), num_heads, width, rotated, at<float>(cos), at<float>(sin), of_heads);
      },
      free_gil);
  m.def(
      "draw",
      [](Address logits, std::int64_t count, double temperature, std::uint64_t noise, double top_p, std::int64_t top_k,
         double min_p) { return Draw(at<float>(logits), count, {temperature, noise, top_p, top_k, min_p}).run(); },
      free_gil);
  m.def(
      "likeliest",
      [](bool bf16, Address logits, std::int64_t count) {
        return bf16 ? likeliest(at<std::uint16_t>(logits), count) : likeliest(at<float>(logits), count);
      },
      free_gil);
  m.def(
      "exclude",
      [](Address logits, std::int64_t count, Address may) {
        kernels().exclude(at<float>(logits), count, at<std::uint32_t>(may));
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
