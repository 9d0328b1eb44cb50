// Operators as native libraries have them; compiled by test_hazards_native_code.py.
#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/library.h>

#include <algorithm>

namespace {

// The maximum of each column: fills its result by an operator, and goes on by address (as torch_scatter's).
at::Tensor column_max(const at::Tensor& x) {
  auto source = x.contiguous();
  auto result = at::full({source.size(1)}, -1e30, source.options());
  const float* from = source.data_ptr<float>();
  float* to = result.data_ptr<float>();
  for (int64_t i = 0; i < source.size(0); i++)
    for (int64_t j = 0; j < source.size(1); j++) to[j] = std::max(to[j], from[i * source.size(1) + j]);
  return result;
}

// Adds to an argument by address, which its schema does not say, and computes from it before and after.
at::Tensor add_by_address(const at::Tensor& x, at::Tensor total) {
  auto before = total.sin();
  for (int64_t i = 0; i < x.numel(); i++) total.data_ptr<float>()[i] += x.data_ptr<float>()[i];
  return before + total.cos();
}

// Writes by address, between the operators that read them, to a tensor that dies when it returns and to one of its results.
std::tuple<at::Tensor, at::Tensor, at::Tensor> through_tensors_of_its_own(const at::Tensor& x) {
  auto own = at::zeros_like(x);
  auto before = own + x;
  own.data_ptr<float>()[0] = 3;
  auto between = own.sin() + x;
  own.data_ptr<float>()[1] = 5;
  own.mul_(x);
  own.data_ptr<float>()[2] = 7;
  auto unset = at::empty_like(x);
  for (int64_t i = 0; i < x.numel(); i++) unset.data_ptr<float>()[i] = static_cast<float>(i);
  auto early = unset * 2;
  unset.data_ptr<float>()[3] = -1;
  return {before + between + own * 2, early, unset};
}

// Its backward pass works by address as well.
struct Doubled : torch::autograd::Function<Doubled> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x) {
    context->save_for_backward({x});
    return x * 2;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    auto x = context->get_saved_variables()[0];
    auto gradient = gradients[0].contiguous();
    auto result = at::zeros_like(x);
    for (int64_t i = 0; i < x.numel(); i++)
      result.data_ptr<float>()[i] += 2 * gradient.data_ptr<float>()[i] + 0 * x.data_ptr<float>()[i];
    return {result};
  }
};
at::Tensor doubled(const at::Tensor& x) { return Doubled::apply(x); }

// Keeps its argument; `plus_kept` reads it by address, `times_kept` by an operator.
at::Tensor kept;
void keep(const at::Tensor& x) { kept = x; }
at::Tensor plus_kept(const at::Tensor& x) {
  auto result = at::empty_like(x);
  for (int64_t i = 0; i < x.numel(); i++) result.data_ptr<float>()[i] = x.data_ptr<float>()[i] + kept.data_ptr<float>()[i];
  return result;
}
at::Tensor times_kept(const at::Tensor& x) { return x * kept; }
void forget() { kept = at::Tensor(); }

// An operator with a kernel for the CPU that does nothing of this kind.
at::Tensor halved(const at::Tensor& x) {
  auto result = at::empty_like(x);
  for (int64_t i = 0; i < x.numel(); i++) result.data_ptr<float>()[i] = x.data_ptr<float>()[i] / 2;
  return result;
}

float sum_at(const float* from, int64_t count) {
  float sum = 0;
  for (int64_t i = 0; i < count; i++) sum += from[i];
  return sum;
}

}  // namespace

// Functions that Python calls directly, with the GIL. Each takes the addresses of tensors, calls operators, and reads only then.
// An operator that makes something large:
extern "C" float sum_behind(int64_t numel, PyObject* given) {
  const at::Tensor& x = THPVariable_Unpack(given);
  const float* from = x.const_data_ptr<float>();
  auto other = at::ones({numel});
  return sum_at(from, x.numel()) + other.sum().item<float>();
}
// Two tensors that do not fit at once, in a list:
extern "C" float sums_behind(int64_t numel, PyObject* one, PyObject* other) {
  std::vector<const float*> from;
  for (PyObject* given : {one, other}) from.push_back(THPVariable_Unpack(given).const_data_ptr<float>());
  auto made = at::ones({numel});
  float sum = made.sum().item<float>();
  for (const float* place : from) sum = 3 * sum + sum_at(place, THPVariable_Unpack(one).numel());
  return sum;
}
// An operator on the same tensor, which brings it back:
extern "C" float sum_of_both(int64_t, PyObject* given) {
  at::Tensor x = THPVariable_Unpack(given);
  const float* from = x.const_data_ptr<float>();
  return x.neg().sum().item<float>() / 2 + sum_at(from, x.numel());
}

TORCH_LIBRARY(dtrrun_tests, m) {
  m.def("column_max", &column_max);
  m.def("add_by_address", &add_by_address);
  m.def("through_tensors_of_its_own", &through_tensors_of_its_own);
  m.def("doubled", &doubled);
  m.def("keep(Tensor x) -> ()");
  m.def("plus_kept(Tensor x) -> Tensor");
  m.def("times_kept(Tensor x) -> Tensor");
  m.def("forget() -> ()", &forget);
}
TORCH_LIBRARY_IMPL(dtrrun_tests, CPU, m) {
  m.impl("keep", &keep);
  m.impl("plus_kept", &plus_kept);
  m.impl("times_kept", &times_kept);
}
TORCH_LIBRARY(dtrrun_plain, m) { m.def("halved(Tensor x) -> Tensor"); }
TORCH_LIBRARY_IMPL(dtrrun_plain, CPU, m) { m.impl("halved", &halved); }

// Functions of an extension, of each kind that Python knows: what they do to tensors, no operator tells.
namespace {

PyObject* made(at::Tensor tensor) { return THPVariable_Wrap(std::move(tensor)); }

// Its result is made by an operator, and filled by address.
PyObject* doubled_by_address(PyObject*, PyObject* given) {
  const at::Tensor& x = THPVariable_Unpack(given);
  auto result = at::zeros_like(x);
  for (int64_t i = 0; i < x.numel(); i++) result.data_ptr<float>()[i] = 2 * x.const_data_ptr<float>()[i];
  return made(result);
}
// Writes to an argument.
PyObject* add_to_first(PyObject*, PyObject* const* given, Py_ssize_t) {
  const at::Tensor &x = THPVariable_Unpack(given[0]), &y = THPVariable_Unpack(given[1]);
  for (int64_t i = 0; i < x.numel(); i++) x.data_ptr<float>()[i] += y.const_data_ptr<float>()[i];
  Py_RETURN_NONE;
}
// Calls operators alone.
PyObject* sine_of_sum(PyObject*, PyObject* args, PyObject* kwargs) {
  PyObject *list, *scale = nullptr;
  static const char* names[] = {"tensors", "scale", nullptr};
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O|O", const_cast<char**>(names), &list, &scale)) return nullptr;
  auto sum = THPVariable_Unpack(PyList_GetItem(list, 0)).clone();
  for (Py_ssize_t i = 1; i < PyList_Size(list); i++) sum.add_(THPVariable_Unpack(PyList_GetItem(list, i)));
  auto result = at::sin(at::sin(sum));
  return made(scale == nullptr ? result : result * THPVariable_Unpack(scale));
}

PyMethodDef functions[] = {
    {"doubled_by_address", &doubled_by_address, METH_O, nullptr},
    {"add_to_first", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&add_to_first)), METH_FASTCALL, nullptr},
    {"sine_of_sum", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&sine_of_sum)), METH_VARARGS | METH_KEYWORDS,
     nullptr},
    {nullptr, nullptr, 0, nullptr}};
PyModuleDef definition = {PyModuleDef_HEAD_INIT, "operators", nullptr, -1, functions};

}  // namespace

PyMODINIT_FUNC PyInit_operators() { return PyModule_Create(&definition); }
