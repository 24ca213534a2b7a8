// A whole decode step for Python. Addresses are integers; the Python callers check the shapes.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
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

using Numbers = std::tuple<Address, float, float>;  // of a norm: address of its weight, eps, offset

Norm norm_of(const Numbers& numbers) {
  const auto& [weight, eps, offset] = numbers;
  return {at<void>(weight), eps, offset};
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
      .def("__init__", [](Decoder* self, bool bf16, int num_query_heads, int num_kv_heads, int head_dim, int rotary_dim,
                          float scale, float softcap, const Matrix& embedding, float embedding_scale, Address norm, float eps, float offset,
                          const Matrix& head, bool gelu) {
        new (self) Decoder{bf16, num_query_heads, num_kv_heads, head_dim, rotary_dim, scale, softcap, embedding, embedding_scale,
                           {at<void>(norm), eps, offset}, head, gelu, {}};
      })
      .def("add_layer", [](Decoder& self, const Matrix& qkv, const Matrix& output, const Numbers& before_attention,
                           const Numbers& after_attention, const Numbers& before_mlp, const Numbers& after_mlp,
                           const Numbers& of_queries, const Numbers& of_keys, int rope) {
        self.layers.push_back({qkv, output, norm_of(before_attention), norm_of(before_mlp), norm_of(after_attention),
                               norm_of(after_mlp), norm_of(of_queries), norm_of(of_keys)});
        self.layers.back().rope = rope;
      })
      .def("set_mlp", [](Decoder& self, const Matrix& gate_up, const Matrix& down) {  // of the last layer
        self.layers.back().gate_up = gate_up, self.layers.back().down = down;
      })
      .def("set_experts", [](Decoder& self, const Matrix& router, const std::vector<Matrix>& gate_up,
                             const std::vector<Matrix>& down, int top_k, bool sigmoid, bool normalised, float factor,
                             Address bias) {
        const Routing routing{top_k, sigmoid, normalised, factor, at<float>(bias)};
        self.layers.back().experts = std::make_shared<const Experts>(Experts{router, gate_up, down, routing});
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
      .def("add_window", [](DecodeSequence& self, Address keys, Address values, std::int64_t stride) {
        self.layers.push_back({at<void>(keys), at<void>(values), stride, nullptr, 0, nullptr, 0, true, true});
      })
      .def("begin", [](DecodeSequence& self, const std::vector<std::int64_t>& ids, std::int64_t position, Address cos, Address sin,
                       const std::vector<float>& query_scales, Address runs, std::int64_t num_runs,
                       std::int64_t num_pool_pages, std::int64_t window_first, std::int64_t window_count) {
        self.ids = ids, self.position = position, self.cos = at<void>(cos), self.sin = at<void>(sin);
        self.query_scales = query_scales;
        self.runs = at<const Run>(runs), self.num_runs = num_runs, self.num_pool_pages = num_pool_pages;
        self.window_first = window_first, self.window_count = window_count;
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
  // -1 seconds: queries that rank pages or tokens are not finite, or logits that votes are compared with.
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
