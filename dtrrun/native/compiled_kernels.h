// Kernels that `torch.compile` has generated, as operators.
//
// The code that inductor generates allocates buffers and calls kernels on them, bypassing PyTorch's dispatcher. While a session
// is on, a `CompiledKernel` replaces each kernel in that code. It passes the call to the session as a call of an operator
// `inductor_kernel::<name>`, whose schema says what the kernel reads and writes. Elsewhere it calls the kernel.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/function_schema.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/empty_strided.h>
#include <torch/csrc/Dtype.h>

#include <unordered_map>

#include "interposer.h"
#include "python.h"

namespace dtrrun {

// The kinds of a kernel's arguments: a tensor that it reads, a tensor that it writes to and perhaps reads as well, or a number.
enum class KernelArgument : char { READS = 'r', WRITES = 'w', INTEGER = 'i', NUMBER = 'f' };

// The operator for a kernel. If it has many arguments, it gets them as lists, since PyTorch limits their number: tensors that
// it reads, tensors that it writes to, integers and numbers.
class KernelOperator {
 public:
  // name: the operator's, with its namespace; it may exist already. kernel: a Python function. arguments: a letter for each.
  static KernelOperator& of(const std::string& name, PyObject* kernel, const std::string& arguments) {
    auto known = all_.find(name);
    if (known == all_.end()) known = all_.emplace(name, new KernelOperator(name, kernel, arguments)).first;
    return *known->second;
  }

  const OperatorHandle& handle() const { return *handle_; }
  // Returns a kernel's arguments as a stack, as the operator takes them.
  Stack packed(std::vector<IValue> given) const { return is_packed(arguments_) ? pack(arguments_, given) : std::move(given); }

 private:
  static constexpr const char* BY = "by dtrrun";
  static constexpr size_t MOST = 32;  // arguments that are not packed into lists
  static constexpr KernelArgument ORDER[] = {KernelArgument::READS, KernelArgument::WRITES, KernelArgument::INTEGER,
                                             KernelArgument::NUMBER};

  KernelOperator(const std::string& name, PyObject* kernel, const std::string& arguments) : arguments_(arguments) {
    std::vector<c10::Argument> all;
    if (is_packed(arguments))
      for (KernelArgument kind : ORDER) all.push_back(argument(kind, all.size(), true));
    else
      for (char one : arguments) all.push_back(argument(static_cast<KernelArgument>(one), all.size(), false));
    c10::FunctionSchema schema(name, "", std::move(all), {});
    auto& dispatcher = c10::Dispatcher::singleton();
    c10::OperatorName operator_name = schema.operator_name();
    registered_.push_back(dispatcher.registerDef(std::move(schema), BY));
    // Not for meta tensors, which have no memory.
    for (DispatchKey key : {DispatchKey::CPU, DispatchKey::CUDA}) {
      auto called = c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<Call>(kernel, arguments));
      registered_.push_back(dispatcher.registerImpl(operator_name, key, std::move(called), std::nullopt, nullptr, BY));
    }
    handle_ = dispatcher.findSchema(operator_name);
  }

  static bool is_packed(const std::string& arguments) { return arguments.size() > MOST; }

  static c10::Argument argument(KernelArgument kind, size_t place, bool list) {
    bool is_tensor = kind == KernelArgument::READS || kind == KernelArgument::WRITES;
    c10::TypePtr type;
    if (is_tensor)
      type = list ? c10::TypePtr(c10::ListType::ofTensors()) : c10::TypePtr(c10::TensorType::get());
    else if (kind == KernelArgument::INTEGER)
      type = list ? c10::TypePtr(c10::ListType::ofInts()) : c10::TypePtr(c10::IntType::get());
    else
      type = list ? c10::TypePtr(c10::ListType::ofFloats()) : c10::TypePtr(c10::FloatType::get());
    std::string name = "a" + std::to_string(place);
    std::optional<c10::AliasInfo> alias;
    if (kind == KernelArgument::WRITES) {
      auto own = c10::Symbol::fromQualString("alias::" + name);
      alias.emplace();
      alias->setIsWrite(true);
      alias->addBeforeSet(own);
      alias->addAfterSet(own);
    }
    return c10::Argument(name, type, std::nullopt, std::nullopt, /*kwarg_only=*/false, std::move(alias));
  }

  static Stack pack(const std::string& arguments, const std::vector<IValue>& given) {
    c10::List<at::Tensor> tensors[2];
    c10::List<int64_t> integers;
    c10::List<double> numbers;
    for (size_t i = 0; i < given.size(); i++) {
      if (given[i].isInt())
        integers.push_back(given[i].toInt());
      else if (given[i].isDouble())
        numbers.push_back(given[i].toDouble());
      else
        tensors[static_cast<KernelArgument>(arguments[i]) == KernelArgument::WRITES].push_back(given[i].toTensor());
    }
    return {std::move(tensors[0]), std::move(tensors[1]), std::move(integers), std::move(numbers)};
  }
  // The inverse of `pack`.
  static std::vector<IValue> unpack(const std::string& arguments, const IValue* lists) {
    std::vector<IValue> given;
    std::unordered_map<char, size_t> next;
    for (char one : arguments) {
      auto kind = std::find(std::begin(ORDER), std::end(ORDER), static_cast<KernelArgument>(one)) - std::begin(ORDER);
      given.push_back(lists[kind].toList().get(next[one]++));
    }
    return given;
  }

  // Calls a kernel on an operator's arguments.
  struct Call final : c10::OperatorKernel {
    Call(PyObject* kernel, const std::string& arguments) : kernel(Ref::copy(kernel).release()), arguments(arguments) {}
    void operator()(const OperatorHandle& op, DispatchKeySet, Stack* stack) {
      size_t count = op.schema().arguments().size();
      const IValue* values = stack->data() + (stack->size() - count);
      auto given = is_packed(arguments) ? unpack(arguments, values) : std::vector<IValue>(values, values + count);
      Gil gil;
      Ref args = checked(PyTuple_New(static_cast<Py_ssize_t>(given.size())));
      for (size_t i = 0; i < given.size(); i++) PyTuple_SET_ITEM(args.get(), i, to_python(given[i], Enumeration::NONE).release());
      checked(PyObject_Call(kernel, args.get(), nullptr));
      torch::jit::drop(*stack, count);
    }
    PyObject* kernel;  // never released: the dispatcher may be destroyed after Python
    std::string arguments;
  };

  std::string arguments_;
  std::vector<c10::RegistrationHandleRAII> registered_;
  std::optional<OperatorHandle> handle_;
  static inline std::unordered_map<std::string, KernelOperator*>& all_ = *new std::unordered_map<std::string, KernelOperator*>;
};

// What the generated code calls in place of a kernel.
struct CompiledKernel {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  PyObject* kernel;  // what is called without a session
  KernelOperator* op;
  std::string* arguments;

  static inline PyTypeObject* type = nullptr;

  static PyObject* make(PyObject*, PyObject* args) {
    const char *name, *arguments;
    PyObject *kernel, *plain;
    if (!PyArg_ParseTuple(args, "sOOs", &name, &kernel, &plain, &arguments)) return nullptr;
    return guarded([&]() -> PyObject* {
      KernelOperator& op = KernelOperator::of(name, kernel, arguments);
      auto* made = PyObject_New(CompiledKernel, type);
      if (made == nullptr) raise();
      made->vectorcall = &called;
      made->kernel = Ref::copy(plain).release();
      made->op = &op;
      made->arguments = new std::string(arguments);
      return reinterpret_cast<PyObject*>(made);
    });
  }

  static PyTypeObject* make_type() {
    static PyMemberDef members[] = {
        {"__vectorcalloffset__", T_PYSSIZET, offsetof(CompiledKernel, vectorcall), READONLY, nullptr},
        {"kernel", T_OBJECT, offsetof(CompiledKernel, kernel), READONLY, nullptr},
        {nullptr, 0, 0, 0, nullptr},
    };
    auto destroy = [](PyObject* self) {
      auto* one = reinterpret_cast<CompiledKernel*>(self);
      PyTypeObject* its_type = Py_TYPE(self);
      Py_CLEAR(one->kernel);
      delete one->arguments;
      PyObject_Free(self);
      Py_DECREF(its_type);
    };
    PyType_Slot slots[] = {
        {Py_tp_dealloc, reinterpret_cast<void*>(+destroy)},
        {Py_tp_call, reinterpret_cast<void*>(&PyVectorcall_Call)},
        {Py_tp_members, members},
        {Py_tp_doc, const_cast<char*>("A kernel that torch.compile has generated, which a session sees.")},
        {0, nullptr},
    };
    constexpr unsigned long flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_DISALLOW_INSTANTIATION;
    PyType_Spec spec = {"_dtrrun_native.CompiledKernel", sizeof(CompiledKernel), 0, flags, slots};
    return reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  }

 private:
  static PyObject* called(PyObject* self, PyObject* const* given, size_t count, PyObject* names) {
    auto* one = reinterpret_cast<CompiledKernel*>(self);
    if (!is_switched_on() || is_hidden() || !are_left_out(names) ||
        static_cast<size_t>(PyVectorcall_NARGS(count)) != one->arguments->size())
      return PyObject_Vectorcall(one->kernel, given, count, names);
    return guarded([&]() -> PyObject* {
      std::vector<IValue> all;
      all.reserve(one->arguments->size());
      DispatchKey key = DispatchKey::Undefined;
      for (size_t i = 0; i < one->arguments->size(); i++) {
        switch (static_cast<KernelArgument>((*one->arguments)[i])) {
          case KernelArgument::INTEGER: all.emplace_back(static_cast<int64_t>(PyLong_AsLongLong(given[i]))); break;
          case KernelArgument::NUMBER: all.emplace_back(PyFloat_AsDouble(given[i])); break;
          default:
            if (!is_tensor(given[i])) return PyObject_Vectorcall(one->kernel, given, count, names);
            all.emplace_back(tensor_of(given[i]));
            if (key == DispatchKey::Undefined) key = all.back().toTensor().is_cuda() ? DispatchKey::CUDA : DispatchKey::CPU;
        }
        if (PyErr_Occurred()) raise();
      }
      if (key == DispatchKey::Undefined) return PyObject_Vectorcall(one->kernel, given, count, names);
      UpdatedConstants updated(*one->arguments, all);
      Stack stack = one->op->packed(std::move(all));
      BoxedArrival arrival(one->op->handle(), DispatchKeySet(key), &stack);
      arrive(arrival);
      updated.finish();
      Py_RETURN_NONE;
    });
  }

  // Returns true if there are no keyword arguments that matter. A launcher's only one is the stream to run on: the current one.
  static bool are_left_out(PyObject* names) {
    return names == nullptr ||
           (PyTuple_GET_SIZE(names) == 1 && PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(names, 0), "stream") == 0);
  }

  // Constants that a kernel reads and updates besides computing its results: running statistics. The results could not be
  // recomputed, since the old content is lost. So if the constants are small, the kernel works on a copy, which is then copied
  // into the constant; and the old content is kept in another copy, for as long as some recipe reads it.
  class UpdatedConstants {
   public:
    UpdatedConstants(const std::string& arguments, std::vector<IValue>& given) {
      auto session = Interposer::current();
      if (!session) return;
      find(*session, arguments, given);
      at::AutoDispatchBelowADInplaceOrView guard;
      for (Update& one : updates_) {
        if (!session->keep_copy_of(one.constant)) {
          updates_.clear();
          return;
        }
        one.copy = one.constant.clone(at::MemoryFormat::Preserve);
      }
      for (IValue& value : given)
        if (const Update* one = of(value)) value = one->copy;
    }
    // The kernel has run.
    void finish() {
      if (updates_.empty()) return;
      at::AutoDispatchBelowADInplaceOrView guard;
      for (Update& one : updates_) one.constant.copy_(one.copy);
    }

   private:
    struct Update {
      at::Tensor constant, copy;
    };
    // Finds the constants that are updated; none if a copy of some cannot take their place.
    void find(Interposer& session, const std::string& arguments, const std::vector<IValue>& given) {
      bool others = false;
      for (size_t i = 0; i < arguments.size(); i++) {
        if (static_cast<KernelArgument>(arguments[i]) != KernelArgument::WRITES) continue;
        if (!session.is_updated_constant(given[i].toTensor()))
          others = true;
        else if (of(given[i]) == nullptr)
          updates_.push_back({given[i].toTensor(), at::Tensor()});
      }
      auto has_a_place = [&](const IValue& value) {
        const Update* one = of(value);
        return one == nullptr || can_stand_for(value.toTensor(), one->constant);
      };
      if (!others || !std::all_of(given.begin(), given.end(), has_a_place)) updates_.clear();
    }
    // Returns the update of the constant whose memory an argument has, or null.
    const Update* of(const IValue& value) const {
      if (!value.isTensor()) return nullptr;
      auto is_it = [&](const Update& one) { return value.toTensor().is_alias_of(one.constant); };
      auto found = std::find_if(updates_.begin(), updates_.end(), is_it);
      return found == updates_.end() ? nullptr : &*found;
    }
    // Returns true if a copy of a constant can replace a tensor over its memory, which must be small and the same part of it.
    static bool can_stand_for(const at::Tensor& tensor, const at::Tensor& constant) {
      return tensor.nbytes() <= static_cast<size_t>(SMALL_COPY) && tensor.is_non_overlapping_and_dense() &&
             tensor.sizes() == constant.sizes() && tensor.strides() == constant.strides() &&
             tensor.storage_offset() == constant.storage_offset();
    }
    c10::SmallVector<Update, 2> updates_;
  };
};

// Like `torch._C._dynamo.guards._empty_strided_cpu` and its variants, but as an operator.
template <c10::DeviceType device>
PyObject* empty_strided(PyObject*, PyObject* args) {
  return guarded([&]() -> PyObject* {
    if (PyTuple_GET_SIZE(args) != 3) throw c10::TypeError({__func__, __FILE__, 0}, "size, stride and dtype are wanted");
    auto numbers = [](PyObject* from) {
      Ref items = checked(PySequence_Fast(from, "a tuple of numbers is wanted"));
      c10::SmallVector<int64_t, 8> to;
      for (PyObject* one : Items(items.get())) to.push_back(PyLong_AsLongLong(one));
      if (PyErr_Occurred()) raise();
      return to;
    };
    auto size = numbers(PyTuple_GET_ITEM(args, 0)), stride = numbers(PyTuple_GET_ITEM(args, 1));
    auto dtype = reinterpret_cast<THPDtype*>(PyTuple_GET_ITEM(args, 2))->scalar_type;
    at::AutoDispatchBelowADInplaceOrView guard;
    return object_of(at::empty_strided(size, stride, at::TensorOptions(dtype).device(device))).release();
  });
}

}  // namespace dtrrun
