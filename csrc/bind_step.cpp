// A whole decode step for Python. Addresses are integers; the Python callers check the shapes.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include "step.hpp"

namespace nb = nanobind;
using namespace kvsift;
using Address = std::uintptr_t;

namespace {

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

// Seconds that selections took, and the shares of attention that were estimated, by sequence.
using Done = std::pair<double, std::vector<std::vector<double>>>;

template <class T>
Done step(const Decoder& decoder, const std::vector<const DecodeSequence*>& sequences, int threads, Address logits) {
  DecodeStep<T> step(decoder, sequences, at<T>(logits));
  Done done{step.run(threads), {}};
  for (std::size_t i = 0; i < sequences.size(); ++i) done.second.push_back(step.estimated(i));
  return done;
}

}  // namespace

void bind_step(nb::module_& m) {
  nb::class_<Matrix>(m, "Matrix")
      .def("__init__", [](Matrix* self, Address weight, Address bias, std::int64_t num_out, int num_in) {
        new (self) Matrix{at<void>(weight), at<void>(bias), num_out, num_in};
      })
      .def("__init__", [](Matrix* self, const std::vector<PackedMatrix>& parts, Address bias) {
        std::int64_t num_out = 0;
        for (const PackedMatrix& part : parts) num_out += part.num_out;
        new (self) Matrix{nullptr, at<void>(bias), num_out, parts.at(0).num_in, parts};
      });
  nb::class_<Decoder>(m, "Decoder")
      .def("__init__", [](Decoder* self, bool bf16, int num_query_heads, int num_kv_heads, int head_dim, float scale,
                          const Matrix& embedding, Address norm, float norm_eps, const Matrix& head) {
        new (self) Decoder{bf16, num_query_heads, num_kv_heads, head_dim, scale, embedding, at<void>(norm), norm_eps, head, {}};
      })
      .def("add_layer", [](Decoder& self, const Matrix& qkv, const Matrix& output, const Matrix& gate_up, const Matrix& down,
                           Address attention_norm, float attention_eps, Address mlp_norm, float mlp_eps, Address query_norm,
                           Address key_norm, float head_eps) {
        self.layers.push_back({qkv, output, gate_up, down, at<void>(attention_norm), at<void>(mlp_norm), at<void>(query_norm),
                               at<void>(key_norm), attention_eps, mlp_eps, head_eps});
      });
  nb::class_<DecodeSequence>(m, "DecodeSequence")
      .def("__init__", [](DecodeSequence* self, int page_size, bool coded) {
        new (self) DecodeSequence{};
        self->page_size = page_size, self->coded = coded;
      })
      .def("keep_sketches", [](DecodeSequence& self, const SketchFormat& format) { self.sketch = format; })
      .def("clear", [](DecodeSequence& self) { self.layers.clear(); })
      .def("add_layer", [](DecodeSequence& self, Address keys, Address values, std::int64_t stride, Address extremes,
                           std::int64_t extremes_stride, Address sketches, std::int64_t sketches_stride) {
        self.layers.push_back({at<void>(keys), at<void>(values), stride, at<void>(extremes), extremes_stride,
                               at<std::uint8_t>(sketches), sketches_stride});
      })
      .def("begin", [](DecodeSequence& self, const std::vector<std::int64_t>& ids, std::int64_t position, Address cos, Address sin,
                       Address runs, std::int64_t num_runs, std::int64_t num_pool_pages) {
        self.ids = ids, self.position = position, self.cos = at<void>(cos), self.sin = at<void>(sin);
        self.runs = at<const Run>(runs), self.num_runs = num_runs, self.num_pool_pages = num_pool_pages;
        self.selects = false, self.asked = nullptr, self.chosen = nullptr;
        for (LayerPages& layer : self.layers) layer.dense = true;
      })
      .def("select", [](DecodeSequence& self, const std::vector<int>& layers, std::int64_t sinks_stop, std::int64_t window_start,
                        std::int64_t first_candidate, std::int64_t num_candidates, std::int64_t num_units, int num_selections,
                        bool by_sketches, bool rest) {
        self.rule = {sinks_stop, window_start, first_candidate, num_candidates, num_units, num_selections, by_sketches, rest};
        self.selects = !layers.empty();
        for (int layer : layers) self.layers.at(std::size_t(layer)).dense = false;
      })
      .def("record", [](DecodeSequence& self, Address asked, Address chosen) {
        self.asked = at<void>(asked), self.chosen = at<std::int64_t>(chosen);
      });
  // -1 seconds: queries that rank pages or tokens are not finite.
  m.def(
      "step",
      [](const Decoder& decoder, const std::vector<const DecodeSequence*>& sequences, int threads, Address logits) {
        try {
          return (decoder.bf16 ? step<std::uint16_t> : step<float>)(decoder, sequences, threads, logits);
        } catch (const NotFinite&) {
          return Done{-1.0, {}};
        }
      },
      nb::call_guard<nb::gil_scoped_release>());
}
