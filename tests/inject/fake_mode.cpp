// Fake tensors in C++, as PyTorch is going to have them: a fallback at the dispatch key `Fake`, which computes shapes only.
//
// It keeps PyTorch's rules for the key, which are what a second user of it would meet. The key is switched on for as long as
// the mode is. An operator on a fake tensor outside of the mode begins the mode for itself, and ends it by switching the key
// off, whoever has switched it on. With the key on and no mode, or with a real tensor in the mode, an operator is an error.
#include <ATen/core/dispatch/Dispatcher.h>
#include <Python.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <optional>

namespace {

thread_local bool is_on = false;
long handled = 0;

void switch_mode(bool on) {
  is_on = on;
  c10::impl::tls_set_dispatch_key_included(c10::DispatchKey::Fake, on);
}

bool is_fake(const at::Tensor& tensor) { return tensor.unsafeGetTensorImpl()->key_set().has(c10::DispatchKey::Fake); }

template <class Function>
void each_tensor(torch::jit::Stack& stack, size_t first, const Function& function) {
  for (size_t place = first; place < stack.size(); place++)
    if (stack[place].isTensor() && stack[place].toTensor().defined()) function(stack[place].toTensor());
}

void infer_shapes(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  size_t first = stack->size() - arguments.size();
  bool any_fake = false, any_real = false;
  c10::Device device(c10::kCPU);
  each_tensor(*stack, first, [&](const at::Tensor& tensor) {
    (is_fake(tensor) ? any_fake : any_real) = true;
    if (is_fake(tensor)) device = tensor.device();
  });
  struct ForOne {
    bool begins;
    explicit ForOne(bool begins) : begins(begins) {
      if (begins) switch_mode(true);
    }
    ~ForOne() {
      if (begins) switch_mode(false);
    }
  } mode(!is_on && any_fake);
  TORCH_CHECK(is_on, "the key Fake is on without a fake mode, for ", op.operator_name());
  TORCH_CHECK(!any_real, "convert all tensors to fake ones first, for ", op.operator_name());
  handled++;
  for (size_t i = 0; i < arguments.size(); i++) {
    c10::IValue& value = (*stack)[first + i];
    bool names_device = arguments[i].name() == "device";
    if (names_device && value.isDevice()) device = value.toDevice();
    if (names_device) value = c10::Device(c10::DeviceType::Meta);
  }
  {
    c10::impl::ExcludeDispatchKeyGuard real(c10::DispatchKey::Fake);
    c10::impl::IncludeDispatchKeyGuard meta(c10::DispatchKey::Meta);
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), stack);
  }
  each_tensor(*stack, stack->size() - op.schema().returns().size(), [&](const at::Tensor& tensor) {
    // A view has its base's keys, but not its device.
    if (!is_fake(tensor) || tensor.device().is_meta()) tensor.unsafeGetTensorImpl()->set_and_normalize_fake_device(device);
  });
}

PyObject* begin(PyObject*, PyObject*) {
  switch_mode(true);
  Py_RETURN_NONE;
}

PyObject* end(PyObject*, PyObject*) {
  switch_mode(false);
  Py_RETURN_NONE;
}

PyObject* count(PyObject*, PyObject*) { return PyLong_FromLong(handled); }

PyMethodDef methods[] = {
    {"begin", begin, METH_NOARGS, "Begin the mode in this thread."},
    {"end", end, METH_NOARGS, "End the mode in this thread."},
    {"count", count, METH_NOARGS, "How many operators have computed shapes only."},
    {nullptr, nullptr, 0, nullptr},
};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "fake_mode", nullptr, -1, methods};

}  // namespace

TORCH_LIBRARY_IMPL(_, Fake, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&infer_shapes>()); }

PyMODINIT_FUNC PyInit_fake_mode() { return PyModule_Create(&module); }
