// Runs a recorded operator again, from a recipe that the fast path has recorded.
//
// `core/rematerialize.h` decides what is run again, and in which order.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
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

  // Runs an operation; see `Backend::execute`. Returns false, with nothing changed, if Python must run it.
  bool execute(Run& run) {
    const Recorded& maker = *run.maker;
    const Recipe* known_recipe = recipe_of(run.maker);
    if (known_recipe == nullptr) return false;
    const Recipe& recipe = *known_recipe;
    OperatorInfo* known = operators_.find(recipe.handle);
    if (known == nullptr || known->func.get() != recipe.func.get()) return false;
    OperatorInfo& info = *known;
    auto* found = reinterpret_cast<PyObject*>(enclosing(maker.signature));
    auto geometries = geometries_of(found);
    if (geometries == nullptr || geometries->size() != run.uses.size()) return false;
    c10::SmallVector<c10::Storage, 4> targets(run.uses.size());  // that it writes to, by place
    Stack stack;
    int64_t started = 0;
    try {
      stack = arguments(recipe, *geometries, run, targets);
      started = now_ns();
      Restored settings(*recipe.state);
      Drawing drawing(python_.get(), recipe);
      Shortage::Kernel::run(/*locked=*/true, /*own=*/!info.foreign, [&] { call(recipe, *maker.signature, &stack); });
      drawing.end();
    } catch (...) {
      if (!device_.is_cpu() && may_replay_again(info)) return false;
      throw;
    }
    run.cost = now_ns() - started;
    Tensors results;
    for (const IValue& value : stack) add_tensors(value, results);
    auto add = [&](int64_t where) { run.made.push_back(as_storage(where < 0 ? targets[~where] : results[where].storage())); };
    if (!maker.outputs)
      add(maker.where);
    else
      for (const Output& output : *maker.outputs) add(output.where);
    return true;
  }

 private:
  // Makes a random operator draw what it drew when it first ran (`runtime/rng.py`).
  class Drawing {
   public:
    Drawing(PyObject* python, const Recipe& recipe) {
      if (recipe.rng) context_ = checked(PyObject_CallMethod(python, "replaying", "(O)", recipe.rng.get()));
    }
    ~Drawing() {
      if (!context_) return;  // otherwise the kernel has raised
      PyObject *type, *value, *traceback;
      PyErr_Fetch(&type, &value, &traceback);
      if (!Ref(PyObject_CallMethod(context_.get(), "__exit__", nullptr))) PyErr_WriteUnraisable(context_.get());
      PyErr_Restore(type, value, traceback);
    }
    Drawing(const Drawing&) = delete;
    void end() {
      if (Ref context = std::move(context_)) checked(PyObject_CallMethod(context.get(), "__exit__", nullptr));
    }

   private:
    Ref context_;
  };

  // Called while an exception is being handled. Returns true if it means that a GPU ran out of memory, so that Python may run the
  // operator again.
  bool may_replay_again(const OperatorInfo& info) const {
    Ref error = as_error(std::current_exception());
    return checked(PyObject_CallMethod(python_.get(), "may_replay_again", "OO", info.operator_.get(), error.get())).get() == Py_True;
  }

  // Returns the operator's arguments. targets: receives the storages that it writes to, by place.
  Stack arguments(const Recipe& recipe, const std::vector<Geometry>& geometries, const Run& run,
                  c10::SmallVector<c10::Storage, 4>& targets) const {
    c10::SmallVector<at::Tensor, 6> tensors;
    for (size_t place = 0; place < run.uses.size(); place++) {
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
      tensors.push_back(geometries[place].over(use == Use::READ ? memory_of(run, place) : targets[place]));
    }
    Stack stack;
    size_t next = 0;
    for (size_t place = 0; place < recipe.count; place++) {
      int kind = recipe.holes()[place];
      const IValue& value = recipe.values()[place];
      if (kind == VALUE) {
        stack.push_back(value);
      } else if (kind == TENSOR) {
        stack.emplace_back(tensors[next++]);
      } else if (value.isBoolList()) {
        c10::List<std::optional<at::Tensor>> list;
        for (int i = 0; i < kind; i++)
          list.push_back(value.toBoolList().get(i) ? std::optional(tensors[next++]) : std::nullopt);
        stack.emplace_back(std::move(list));
      } else {
        c10::List<at::Tensor> list;
        for (int i = 0; i < kind; i++) list.push_back(tensors[next++]);
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
  void call(const Recipe& recipe, const Signature& signature, Stack* stack) {
    if (device_.is_cpu() && signature.calls != 0 && signature.cost < BRIEF_NS) {
      recipe.handle.callBoxed(stack);
    } else {
      WithoutGil released;
      recipe.handle.callBoxed(stack);
    }
  }

  // Returns the geometries of a signature's tensors, or null if Python must handle them. The caller shares ownership: Python
  // code that runs while room is made may change the budget, and then the table is cleared.
  std::shared_ptr<const std::vector<Geometry>> geometries_of(PyObject* found) {
    auto known = geometries_.find(found);
    if (known == geometries_.end()) {
      Ref tuples = attribute(found, "geometries"), same = attribute(found, "same");
      auto all = std::make_shared<std::vector<Geometry>>();
      bool readable = PyTuple_GET_SIZE(same.get()) == 0;
      for (PyObject* one : Items(tuples.get())) all->emplace_back(one);
      if (!readable) all.reset();
      known = geometries_.emplace(found, std::pair(Ref::copy(found), std::move(all))).first;
    }
    return known->second.second;
  }

  Ref python_;
  const Device& device_;
  OperatorTable& operators_;
  std::unordered_map<PyObject*, std::pair<Ref, std::shared_ptr<const std::vector<Geometry>>>> geometries_;
};

}  // namespace dtrrun
