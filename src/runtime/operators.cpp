#include <torch/library.h>

#include "tersor/runtime/packed.hpp"

// What TorchScript files made by this library name. Loading the shared library registers it.
TORCH_LIBRARY(tersor, m) {
  using tersor::PackedConv;
  using tersor::PackedEmbedding;
  using tersor::PackedLinear;

  m.class_<PackedLinear>("PackedLinear")
      .def_pickle([](const c10::intrusive_ptr<PackedLinear>& self) { return self->state(); },
                  [](const c10::IValue& state) { return PackedLinear::from_state(state); })
      .def("weight", [](const c10::intrusive_ptr<PackedLinear>& self) { return tersor::dequantize(self->weight()); })
      .def("bias", [](const c10::intrusive_ptr<PackedLinear>& self) { return self->bias(); });
  m.class_<PackedConv>("PackedConv")
      .def_pickle([](const c10::intrusive_ptr<PackedConv>& self) { return self->state(); },
                  [](const c10::IValue& state) { return PackedConv::from_state(state); })
      .def("weight", [](const c10::intrusive_ptr<PackedConv>& self) { return tersor::dequantize(self->weight()); })
      .def("bias", [](const c10::intrusive_ptr<PackedConv>& self) { return self->bias(); });
  m.class_<PackedEmbedding>("PackedEmbedding")
      .def_pickle([](const c10::intrusive_ptr<PackedEmbedding>& self) { return self->state(); },
                  [](const c10::IValue& state) { return PackedEmbedding::from_state(state); })
      .def("weight",
           [](const c10::intrusive_ptr<PackedEmbedding>& self) { return tersor::dequantize(self->weight()); });

  m.def("linear(Tensor x, __torch__.torch.classes.tersor.PackedLinear packed) -> Tensor",
        [](const at::Tensor& x, const c10::intrusive_ptr<PackedLinear>& packed) { return packed->forward(x, false); });
  m.def("linear_relu(Tensor x, __torch__.torch.classes.tersor.PackedLinear packed) -> Tensor",
        [](const at::Tensor& x, const c10::intrusive_ptr<PackedLinear>& packed) { return packed->forward(x, true); });
  m.def(
      "conv(Tensor x, __torch__.torch.classes.tersor.PackedConv packed, int[] stride, int[] padding, int[] dilation, "
      "int groups) -> Tensor",
      [](const at::Tensor& x, const c10::intrusive_ptr<PackedConv>& packed, at::IntArrayRef stride,
         at::IntArrayRef padding, at::IntArrayRef dilation,
         std::int64_t groups) { return packed->forward(x, stride, padding, dilation, groups); });
  m.def("embedding(Tensor ids, __torch__.torch.classes.tersor.PackedEmbedding packed) -> Tensor",
        [](const at::Tensor& ids, const c10::intrusive_ptr<PackedEmbedding>& packed) { return packed->forward(ids); });
}
