// Runs a recorded operator again.
//
// `core/rematerialize.h` decides what is run again, and in which order.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Dtype.h>

#include <unordered_map>

#include "../bindings/backend.h"
#include "arrival.h"
#include "device.h"
#include "graph.h"
#include "operator_table.h"
#include "pytorch.h"
#include "shortage.h"

namespace dtrrun {

constexpr int64_t BRIEF_NS = 10'000;  // releasing the GIL would take longer than such a kernel

// A tensor's place in its storage (`core.graph.Geometry`).
struct Geometry {
  c10::SmallVector<int64_t, 5> size, stride;
  int64_t offset = 0;
  caffe2::TypeMeta dtype;
  bool conjugate = false, negative = false;  // bits that its kernels resolve

  // All bytes of a storage.
  explicit Geometry(int64_t nbytes) : size{nbytes}, stride{1}, dtype(caffe2::TypeMeta::Make<uint8_t>()) {}
  explicit Geometry(PyObject* tuple) {
    auto numbers = [](PyObject* from, c10::SmallVector<int64_t, 5>& to) {
      for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(from); i++) to.push_back(as_number(PyTuple_GET_ITEM(from, i)));
    };
    numbers(PyTuple_GET_ITEM(tuple, 0), size);
    numbers(PyTuple_GET_ITEM(tuple, 1), stride);
    offset = as_number(PyTuple_GET_ITEM(tuple, 2));
    dtype = c10::scalarTypeToTypeMeta(reinterpret_cast<THPDtype*>(PyTuple_GET_ITEM(tuple, 3))->scalar_type);
    if (PyTuple_GET_SIZE(tuple) == 4) return;
    conjugate = PyTuple_GET_ITEM(tuple, 4) == Py_True;
    negative = PyTuple_GET_ITEM(tuple, 5) == Py_True;
  }
  at::Tensor over(const c10::Storage& storage) const {
    auto key = storage.device_type() == c10::DeviceType::CPU ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA;
    at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), DispatchKeySet(key), dtype);
    tensor.unsafeGetTensorImpl()->set_storage_offset(offset);
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
    if (conjugate) tensor._set_conj(true);
    if (negative) tensor._set_neg(true);
    return tensor;
  }

 private:
  using DispatchKeySet = c10::DispatchKeySet;
};

// Called while an exception is being handled. Returns true if it means that an operator did not begin because a GPU ran out
// of memory, so that Python may run it again (`CudaInterposer.can_retry`). operator_: null if it may have begun. rng: the
// state of the generator that it draws from.
inline bool can_retry(PyObject* python, PyObject* operator_, PyObject* rng = nullptr) {
  Ref error = as_error(std::current_exception());
  auto given = [](PyObject* object) { return object == nullptr ? Py_None : object; };
  return checked(PyObject_CallMethod(python, "can_retry", "OOO", given(operator_), given(rng), error.get())).get() == Py_True;
}

class Replays {
 public:
  // python: Python's `Interposer`.
  Replays(PyObject* python, OperatorTable& operators, const Device& device)
      : python_(Ref::copy(python)), device_(device), operators_(operators) {}

  void forget() { geometries_.clear(); }

  struct Geometries {
    std::vector<Geometry> all;
    std::vector<size_t> same;  // the first place with the same tensor, for operators that compare them
  };

  // Runs an operation; see `Backend::execute`. On a GPU that has no memory for it, evicts and runs it again.
  void execute(Run& run) {
    const Recipe* recipe = recipe_of(run.maker);
    if (recipe == nullptr) throw std::logic_error("dtrrun: internal error: an operation has no recipe");
    OperatorInfo& info = operators_.of(recipe->handle);
    try {
      return attempt(run, *recipe, info);
    } catch (...) {
      if (device_.is_cpu() || !may_replay_again(info)) throw;
    }
    auto again = [&] { attempt(run, *recipe, info); };
    Ref function = callable(again);
    checked(PyObject_CallMethod(python_.get(), "replay_again", "OOL", function.get(), info.operator_.get(),
                                static_cast<long long>(run.maker->signature->output_bytes)));
  }

 private:
  void attempt(Run& run, const Recipe& recipe, const OperatorInfo& info) {
    auto geometries = geometries_of(reinterpret_cast<PyObject*>(enclosing(run.maker->signature)));
    c10::OptionalDeviceGuard there;
    if (device_.are_several()) there.reset_device(device_.at(run.wanted->device));
    c10::SmallVector<c10::Storage, 4> targets(run.uses.size());  // that it writes to, by place
    Stack stack = arguments(recipe, *geometries, run, targets);
    int64_t started = now_ns();
    {
      Entered turns(info.foreign ? given_up(run, recipe) : Ref());
      Restored settings(*recipe.state);
      Entered drawing(recipe.rng ? checked(PyObject_CallMethod(python_.get(), "replaying", "(O)", recipe.rng.get())) : Ref());
      Entered reading(recipe.around && recipe.around->reading ? put_back(recipe.around->reading) : Ref());
      {
        std::optional<Inside> inside;
        if (info.calls_others) inside.emplace(recipe.around ? recipe.around->autocast : Inside::Dtypes());
        Shortage::Kernel::run(/*locked=*/true, /*own=*/!info.foreign,
                              [&] { call(recipe, *run.maker->signature, info.foreign, &stack); });
      }
      reading.end();
      drawing.end();
    }
    run.cost = now_ns() - started;
    run.made.clear();
    Tensors results;
    for (const IValue& value : stack) add_tensors(value, results);
    auto add = [&](int64_t where) { run.made.push_back(as_storage(where < 0 ? targets[~where] : results[where].storage())); };
    if (!run.maker->outputs)
      add(run.maker->where);
    else
      for (const Output& output : *run.maker->outputs) add(output.where);
  }

  // What the operators that a kernel calls see, while in scope: neither the program's modes nor its autograd (`runtime.guards.below`),
  // but lazy bits are resolved, and autocast casts them as it did.
  class Inside {
   public:
    using Dtypes = std::vector<std::pair<c10::DeviceType, at::ScalarType>>;
    explicit Inside(const Dtypes& dtypes) {
      using c10::DispatchKey;
      c10::DispatchKeySet excluded({DispatchKey::Python, DispatchKey::PythonTLSSnapshot, DispatchKey::PythonDispatcher,
                                    DispatchKey::Fake, DispatchKey::ADInplaceOrView, DispatchKey::FuncTorchDynamicLayerFrontMode,
                                    DispatchKey::FuncTorchDynamicLayerBackMode, DispatchKey::FuncTorchBatched,
                                    DispatchKey::FuncTorchGradWrapper, DispatchKey::FuncTorchVmapMode,
                                    DispatchKey::Functionalize});
      excluded = excluded | c10::autograd_dispatch_keyset | c10::autocast_dispatch_keyset;
      for (auto [type, dtype] : dtypes) {
        before_.emplace_back(type, at::autocast::get_autocast_dtype(type));
        at::autocast::set_autocast_dtype(type, dtype);
        excluded = excluded.remove(type == c10::DeviceType::CPU ? DispatchKey::AutocastCPU : DispatchKey::AutocastCUDA);
      }
      guard_.emplace(c10::DispatchKeySet(DispatchKey::BackendSelect), excluded);
    }
    ~Inside() {
      for (auto [type, dtype] : before_) at::autocast::set_autocast_dtype(type, dtype);
    }
    Inside(const Inside&) = delete;

   private:
    Dtypes before_;
    std::optional<c10::impl::ForceDispatchKeyGuard> guard_;
  };

  static Ref put_back(const Ref& reading) { return checked(PyObject_CallMethod(reading.get(), "put_back", nullptr)); }

  // Returns a context in which other threads have their turns, as the kernel may wait for one of them; null if it changes what they see.
  Ref given_up(const Run& run, const Recipe& recipe) const {
    bool writes = std::find(run.uses.begin(), run.uses.end(), Use::TAKE) != run.uses.end();
    if (writes || recipe.rng || recipe.state->changes_others()) return Ref();
    if (recipe.around && recipe.around->reading) {
      Ref changes = checked(PyObject_CallMethod(recipe.around->reading.get(), "changes", nullptr));
      if (PyObject_IsTrue(changes.get()) != 0) return Ref();
    }
    Ref reads = checked(PyList_New(0));
    for (const Node* one : *run.maker)
      if (PyList_Append(reads.get(), as_object(one).get()) < 0) raise();
    return checked(PyObject_CallMethod(python_.get(), "given_up", "O", reads.get()));
  }

  // Called while an exception is being handled. Returns true if it means that a GPU ran out of memory, so that Python may run the
  // operator again.
  bool may_replay_again(const OperatorInfo& info) const {
    Ref error = as_error(std::current_exception());
    return checked(PyObject_CallMethod(python_.get(), "may_replay_again", "OO", info.operator_.get(), error.get())).get() ==
           Py_True;
  }

  // Returns the operator's arguments. targets: receives the storages that it writes to, by place.
  Stack arguments(const Recipe& recipe, const Geometries& geometries, const Run& run,
                  c10::SmallVector<c10::Storage, 4>& targets) const {
    c10::SmallVector<at::Tensor, 6> tensors;
    for (size_t place = 0; place < run.uses.size(); place++) {
      if (size_t first = geometries.same.empty() ? place : geometries.same[place]; first < place) {
        tensors.push_back(tensors[first]);
        continue;
      }
      TensorEntry entry = run.maker->tensor(place);
      Use use = run.uses[place];
      if (use == Use::BLANK) {
        targets[place] = blank_storage(entry.size);
      } else if (use == Use::AGAIN) {
        size_t before = 0;
        if (entry.version == nullptr)
          before = static_cast<size_t>(entry.same);
        else
          while (run.maker->tensor(before).version != entry.version) before++;
        targets[place] = targets[before];
      } else if (use == Use::TAKE) {
        targets[place] = as_torch(entry.version->scratch);
      } else if (use == Use::COPY) {
        targets[place] = copy_of(memory_of(run, place));
      }
      tensors.push_back(geometries.all[place].over(use == Use::READ ? memory_of(run, place) : targets[place]));
    }
    Stack stack;
    stack.reserve(recipe.count);
    size_t next = 0;
    for (size_t place = 0; place < recipe.count; place++) {
      int kind = recipe.holes()[place];
      const IValue& value = recipe.values()[place];
      if (kind == VALUE) {
        stack.push_back(value);
      } else if (kind == TENSOR) {
        stack.emplace_back(std::move(tensors[next++]));
      } else if (value.isBoolList()) {
        c10::List<std::optional<at::Tensor>> list;
        for (int i = 0; i < kind; i++)
          list.push_back(value.toBoolList().get(i) ? std::optional(std::move(tensors[next++])) : std::nullopt);
        stack.emplace_back(std::move(list));
      } else {
        c10::List<at::Tensor> list;
        list.reserve(static_cast<size_t>(kind));
        for (int i = 0; i < kind; i++) list.push_back(std::move(tensors[next++]));
        stack.emplace_back(std::move(list));
      }
    }
    return stack;
  }
  // Returns the memory of the tensor that is read at this place.
  static c10::Storage memory_of(const Run& run, size_t place) {
    size_t read = place;  // unless something is overwritten, or read more than once
    if (run.maker->tensors) {
      const Version* version = run.maker->tensor(place).version;
      for (read = 0; run.maker->reads[read] != version;) read++;
    }
    return as_torch(run.held[read]);
  }
  c10::Storage blank_storage(int64_t nbytes) const {
    return {c10::Storage::use_byte_size_t(), c10::SymInt(nbytes), c10::GetAllocator(device_.type()), /*resizable=*/true};
  }
  c10::Storage copy_of(const c10::Storage& storage) const {
    auto nbytes = static_cast<int64_t>(storage.nbytes());
    c10::Storage copy = blank_storage(nbytes);
    if (device_.is_cpu()) {
      std::memcpy(copy.mutable_data(), storage.data(), storage.nbytes());
    } else {
      Geometry whole(nbytes);
      whole.over(copy).copy_(whole.over(storage));
    }
    return copy;
  }

  // Runs the operator. `SessionBackend` has already excluded everything that the program has put above the kernels.
  void call(const Recipe& recipe, const Signature& signature, bool foreign, Stack* stack) {
    // PyTorch 2.11 takes results that are several of the arguments (`native_batch_norm.out`) from the stack after they have left it.
    Tensors kept;
    const std::vector<c10::Argument>& results = recipe.handle.schema().returns();
    if (results.size() > 1 && results[0].alias_info() != nullptr)
      for (const IValue& value : *stack) add_tensors(value, kept);
    if (device_.is_modelled()) return call_on_model(recipe, stack);
    if (device_.is_cpu() && !foreign && signature.calls != 0 && signature.cost < BRIEF_NS) {
      recipe.handle.callBoxed(stack);
    } else {
      WithoutGil released;
      recipe.handle.callBoxed(stack);
    }
  }

  void call_on_model(const Recipe& recipe, Stack* stack) {
    auto convert = [&](size_t place) { return to_python((*stack)[place], (*recipe.enumerations)[place]); };
    auto [args, kwargs] = to_arguments(recipe.handle.schema(), stack->data(), PyTuple_New, convert);
    auto compute = [&] {
      recipe.handle.callBoxed(stack);
      return shown_results(*stack);
    };
    Ref function = callable(compute);
    device_.run(recipe.func.get(), args.get(), kwargs.get(), function.get(), /*again=*/true);
  }

  // Returns the geometries of a signature's tensors. The caller shares ownership: Python code that runs while room is made may change the
  // budget, and then the table is cleared.
  std::shared_ptr<const Geometries> geometries_of(PyObject* found) {
    auto known = geometries_.find(found);
    if (known == geometries_.end()) {
      auto made = std::make_shared<Geometries>();
      for (PyObject* one : Items(attribute(found, "geometries").get())) made->all.emplace_back(one);
      for (PyObject* one : Items(attribute(found, "same").get())) made->same.push_back(static_cast<size_t>(as_number(one)));
      known = geometries_.emplace(found, std::pair(Ref::copy(found), std::move(made))).first;
    }
    return known->second.second;
  }

  Ref python_;
  const Device& device_;
  OperatorTable& operators_;
  std::unordered_map<PyObject*, std::pair<Ref, std::shared_ptr<const Geometries>>> geometries_;
};

}  // namespace dtrrun
