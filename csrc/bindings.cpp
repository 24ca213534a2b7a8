// The module kvsift.native._core. Tensors come as addresses and shapes that Python has checked.
#include <nanobind/nanobind.h>

void bind_attention(nanobind::module_& m);
void bind_graph(nanobind::module_& m);
void bind_product(nanobind::module_& m);
void bind_sketch(nanobind::module_& m);
void bind_step(nanobind::module_& m);

NB_MODULE(_core, m) {
  nanobind::set_leak_warnings(false);  // models that live until the interpreter ends have decoders
  bind_attention(m);
  bind_graph(m);
  bind_product(m);
  bind_sketch(m);
  bind_step(m);
}
