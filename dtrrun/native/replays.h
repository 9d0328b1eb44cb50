// Runs a recorded operator again: `Rematerializer._run` and `_collect` in core/rematerialize.py, and `Executor.execute`
// in runtime/execute.py, for what the fast path has recorded.
//
// `Rematerializations` decides what is run again, and in which order.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/Tensor.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Dtype.h>

#include <unordered_map>

#include "device.h"
#include "evict.h"
#include "operators.h"
#include "pytorch.h"
#include "workspace.h"

namespace dtrrun {

constexpr int64_t BRIEF_NS = 10'000;  // for such a kernel, giving up the GIL would take longer than it does

// The tensors in an operator's results, in order (`outputs_of` in dispatch/arguments.py).
inline c10::SmallVector<at::Tensor, 4> tensors_in(const c10::FunctionSchema& schema, const Stack& stack) {
  c10::SmallVector<at::Tensor, 4> tensors;
  size_t count = schema.returns().size(), first = stack.size() - count;
  for (size_t place = 0; place < count; place++) {
    const IValue& value = stack[first + place];
    if (value.isTensor()) {
      if (value.toTensor().defined()) tensors.push_back(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector())
        if (tensor.defined()) tensors.push_back(tensor);
    }
  }
  return tensors;
}

// A tensor's place in its storage (`core.graph.Geometry`).
struct Geometry {
  c10::SmallVector<int64_t, 5> size, stride;
  int64_t offset = 0;
  caffe2::TypeMeta dtype;

  // Returns false if it says more than that.
  bool read(PyObject* tuple) {
    if (PyTuple_GET_SIZE(tuple) != 4) return false;
    auto numbers = [](PyObject* from, c10::SmallVector<int64_t, 5>& to) {
      for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(from); i++) to.push_back(as_number(PyTuple_GET_ITEM(from, i)));
    };
    numbers(PyTuple_GET_ITEM(tuple, 0), size);
    numbers(PyTuple_GET_ITEM(tuple, 1), stride);
    offset = as_number(PyTuple_GET_ITEM(tuple, 2));
    dtype = c10::scalarTypeToTypeMeta(reinterpret_cast<THPDtype*>(PyTuple_GET_ITEM(tuple, 3))->scalar_type);
    return true;
  }
  at::Tensor over(const c10::Storage& storage) const {
    auto key = storage.device_type() == c10::DeviceType::CPU ? c10::DispatchKey::CPU : c10::DispatchKey::CUDA;
    at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), DispatchKeySet(key), dtype);
    tensor.unsafeGetTensorImpl()->set_storage_offset(offset);
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride);
    return tensor;
  }

 private:
  using DispatchKeySet = c10::DispatchKeySet;
};

// Called while an exception is being handled: whether it means that an operator did not begin for want of a GPU's
// memory, so that Python may run it again (`CudaInterposer.can_retry`). operator_: null if it could have begun. rng: the
// state of the generator that it draws from.
inline bool can_retry(PyObject* python, PyObject* operator_, PyObject* rng = nullptr) {
  Ref error = as_error(std::current_exception());
  auto given = [](PyObject* object) { return object == nullptr ? Py_None : object; };
  return checked(PyObject_CallMethod(python, "can_retry", "OOO", given(operator_), given(rng), error.get())).get() == Py_True;
}

class Replays {
 public:
  Replays(PyObject* python, PyObject* dtr, PyObject* classes, Accounts& accounts, Evictions& evictions, Ambient& ambient,
          const Workspaces& workspaces, Operators& operators, const Device& device)
      : python_(Ref::copy(python)), device_(device), rematerializer_(attribute(dtr, "rematerializer")),
        tallies_(attribute(rematerializer_.get(), "by_operator")), workspaces_(workspaces), accounts_(accounts),
        evictions_(evictions), ambient_(ambient), operators_(operators),
        operators_ns_(type_of(classes, "Rematerializer"), "operators_ns"),
        count_(type_of(classes, "Rematerializer"), "rematerializations"),
        nbytes_(type_of(classes, "Rematerializer"), "rematerialized_bytes") {}

  void forget() { geometries_.clear(); }

  // ns in operators that were run again.
  int64_t operators_ns() const { return operators_ns_.number(rematerializer_.get()); }

  bool has_workspace(PyObject* maker) const {
    return signature.workspace.number(operation.signature.get(maker)) != 0;
  }

  // How an attempt to run an operation ended. For Python, as it is when an input has gone, nothing has changed but for what
  // was evicted.
  enum class End : uint8_t { DONE, FOR_PYTHON, INPUT_GONE };

  // Runs an operation whose inputs are locked, for a version that it makes. Raises the budget error.
  End run(PyObject* wanted, PyObject* maker, bool without_workspace) {
    if (recipe_of(maker) == nullptr || evictions_.in_python()) return End::FOR_PYTHON;
    const Recipe& recipe = *recipe_of(maker);
    Reads inputs = operation.inputs(maker);
    auto blank = Blank::of(operation.tensors.get(maker));
    OperatorInfo* known = operators_.find(recipe.handle);
    if (known == nullptr || known->func.get() != recipe.func.get()) return End::FOR_PYTHON;
    OperatorInfo& info = *known;
    PyObject* found = operation.signature.get(maker);
    auto geometries = geometries_of(found);
    Sources sources(inputs, operation.tensors.get(maker));
    if (geometries == nullptr || geometries->size() != sources.size()) return End::FOR_PYTHON;
    for (PyObject* source : inputs)
      if (version.escaped.is_true(source)) return End::FOR_PYTHON;
    PyObject* state = ambient_.read(info.family.get(), info.state, info.general);
    if (state != recipe.state.get()) {
      int equal = PyObject_RichCompareBool(state, recipe.state.get(), Py_EQ);
      if (equal < 0) raise();
      if (equal == 0) return End::FOR_PYTHON;
    }
    auto uses = uses_of(maker, sources);
    bool allocates = std::any_of(uses.begin(), uses.end(), [](Use use) { return use == Use::COPY || use == Use::BLANK; });
    if (!device_.is_cpu() && (allocates || recipe.rng)) return End::FOR_PYTHON;
    c10::SmallVector<c10::Storage, 6> held;  // a garbage collection while room is made would take those that cycles hold
    for (PyObject* source : inputs)
      if (!held.emplace_back(accounts_.memory_of(source))) return End::INPUT_GONE;
    make_room(sources, uses, blank, found, without_workspace);
    workspaces_.provide(found);

    int64_t began = evictions_.decision_observers.start();
    c10::SmallVector<Ref, 1> taken;  // the old versions whose memory is written to
    c10::SmallVector<c10::Storage, 4> targets(sources.size());
    Stack stack = arguments(recipe, *geometries, sources, uses, blank, targets, taken);
    int64_t started = now_ns();
    try {
      Drawing drawing(python_.get(), recipe);
      call(recipe, found, &stack);
      drawing.end();
    } catch (...) {
      if (!device_.is_cpu() && can_retry(python_.get(), info.operator_.get())) return End::FOR_PYTHON;
      drop(taken);
      throw;
    }
    int64_t cost = now_ns() - started;
    held.clear();
    drop(taken);
    operators_ns_.set_number(rematerializer_.get(), operators_ns_.number(rematerializer_.get()) + cost);
    accounts_.add(ledger.clock, signature.cost.number(found));
    collect(wanted, maker, recipe, found, stack, targets);
    for (const Ref& source : taken) accounts_.rule.released(source.get());  // only now: nothing evicted depends on it
    tally(info, cost, version.nbytes.number(wanted));
    if (began != 0) evictions_.decision_observers.rematerialized(wanted, maker, began, cost);
    return End::DONE;
  }

 private:
  // What is done with one of an operation's tensors. BLANK: it gets new memory, since all of it is overwritten.
  enum class Use : uint8_t { READ, COPY, TAKE, AGAIN, BLANK };

  // What an operation overwrites completely, without reading it (`core.graph.Overwritten`): always the first of its tensors.
  struct Blank {
    int64_t nbytes, size;  // as of a version; of the storage

    // tensors: `Operation.tensors`, or None.
    static std::optional<Blank> of(PyObject* tensors) {
      if (tensors == Py_None) return std::nullopt;
      PyObject* first = Items(tensors)[0];
      if (Py_TYPE(first) == version_type) return std::nullopt;
      return Blank{attribute_number(first, "nbytes"), attribute_number(first, "size")};
    }
  };

  // The versions of an operation's tensors, by place: null for what is overwritten.
  class Sources {
   public:
    // tensors: `Operation.tensors`, or None, if they are the inputs.
    Sources(const Reads& inputs, PyObject* tensors)
        : inputs_(inputs), tensors_(tensors == Py_None ? Items() : Items(tensors)), are_inputs_(tensors == Py_None) {}
    size_t size() const { return static_cast<size_t>(are_inputs_ ? inputs_.size() : tensors_.size()); }
    PyObject* operator[](size_t place) const {
      auto at = static_cast<Py_ssize_t>(place);
      PyObject* one = are_inputs_ ? inputs_[at] : tensors_[at];
      return Py_TYPE(one) == version_type ? one : nullptr;
    }

   private:
    Reads inputs_;
    Items tensors_;
    bool are_inputs_;
  };

  // While a random operator draws what it drew when it first ran (`runtime/rng.py`).
  class Drawing {
   public:
    Drawing(PyObject* python, const Recipe& recipe) {
      if (recipe.rng) context_ = checked(PyObject_CallMethod(python, "replaying", "(O)", recipe.rng.get()));
    }
    ~Drawing() {
      if (!context_) return;  // after an error of the kernel
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

  // An operator that writes to an old version gets a copy of it, or its memory if no other recipe reads it.
  c10::SmallVector<Use, 6> uses_of(PyObject* maker, const Sources& sources) const {
    c10::SmallVector<Use, 6> uses(sources.size(), Use::READ);
    if (sources.size() != 0 && sources[0] == nullptr) uses[0] = Use::BLANK;
    operation.each_written(maker, [&](int64_t written) {
      PyObject* target = sources[written];
      if (target == nullptr) return;
      Use use = may_take(target, maker) ? Use::TAKE : Use::COPY;
      for (size_t place = 0; place < uses.size(); place++) {
        if (sources[place] != target) continue;
        uses[place] = use;
        use = Use::AGAIN;
      }
    });
    return uses;
  }
  // Whether only this operation reads an old version (`read_by_others`).
  bool may_take(PyObject* source, PyObject* maker) const {
    if (version.scratch.is_none(source) || version.operation.is_none(source)) return false;  // or a copy
    if (version.locks.number(source) != 1) return false;
    return Py_REFCNT(source) <= 1 + operation.references_to(maker, source);  // 1: the ledger's table
  }

  void make_room(const Sources& sources, const c10::SmallVector<Use, 6>& uses, const std::optional<Blank>& blank,
                 PyObject* found, bool without_workspace) {
    int64_t need = signature.output_bytes.number(found);
    if (without_workspace) need -= signature.workspace.number(found);
    if (blank) need += blank->nbytes;
    for (size_t i = 0; i < uses.size(); i++)
      if (uses[i] == Use::COPY) need += version.nbytes.number(sources[i]);
    evictions_.make_room(need, found);
  }

  // Returns the operator's arguments. targets: receives the storages that it writes to, by place. taken: the old
  // versions whose memory is among them.
  Stack arguments(const Recipe& recipe, const std::vector<Geometry>& geometries, const Sources& sources,
                  const c10::SmallVector<Use, 6>& uses, const std::optional<Blank>& blank,
                  c10::SmallVector<c10::Storage, 4>& targets, c10::SmallVector<Ref, 1>& taken) {
    c10::SmallVector<at::Tensor, 6> tensors;
    for (size_t place = 0; place < uses.size(); place++) {
      PyObject* source = sources[place];
      if (uses[place] == Use::BLANK) {
        targets[place] = blank_storage(blank->size);
      } else if (uses[place] == Use::AGAIN) {
        size_t before = 0;
        while (sources[before] != source) before++;
        targets[place] = targets[before];
      } else if (uses[place] == Use::TAKE) {
        targets[place] = THPStorage_Unpack(version.scratch.get(source));
        taken.push_back(Ref::copy(source));
      } else if (uses[place] == Use::COPY) {
        targets[place] = copy_of(accounts_.memory_of(source));
      }
      bool reads = uses[place] == Use::READ;
      tensors.push_back(geometries[place].over(reads ? accounts_.memory_of(source) : targets[place]));
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
  void drop(const c10::SmallVector<Ref, 1>& taken) {
    for (const Ref& source : taken) {
      accounts_.drop_scratch(source.get());
      accounts_.rule.discard(source.get());
    }
  }
  static c10::Storage blank_storage(int64_t nbytes) {
    return {c10::Storage::use_byte_size_t(), c10::SymInt(nbytes), c10::GetCPUAllocator(), /*resizable=*/true};
  }
  static c10::Storage copy_of(const c10::Storage& storage) {
    c10::Storage copy = blank_storage(static_cast<int64_t>(storage.nbytes()));
    std::memcpy(copy.mutable_data(), storage.data(), storage.nbytes());
    return copy;
  }

  // Runs the operator. `Rematerializations` has gone beneath all that the program has put above the kernels.
  void call(const Recipe& recipe, PyObject* found, Stack* stack) {
    if (device_.is_cpu() && signature.calls.number(found) != 0 && signature.cost.number(found) < BRIEF_NS) {
      recipe.handle.callBoxed(stack);
    } else {
      WithoutGil released;
      recipe.handle.callBoxed(stack);
    }
  }

  // Gives the results to the versions that lack them, and drops the others.
  void collect(PyObject* wanted, PyObject* maker, const Recipe& recipe, PyObject* found, const Stack& stack,
               const c10::SmallVector<c10::Storage, 4>& targets) {
    auto results = tensors_in(recipe.handle.schema(), stack);
    c10::SmallVector<std::pair<Ref, c10::Storage>, 2> made;
    operation.each_made(maker, wanted, [&](int64_t where, PyObject* one) {
      if (version.resident.is_true(one)) return;
      made.emplace_back(Ref::copy(one), where < 0 ? targets[~where] : results[where].storage());
    });
    accounts_.note_peak(accounts_.number(ledger.resident_bytes) + signature.output_bytes.number(found));
    for (auto& [one, storage] : made) give(wanted, one.get(), storage, recipe);
  }
  void give(PyObject* wanted, PyObject* one, c10::Storage& storage, const Recipe& recipe) {
    int64_t nbytes = version.nbytes.number(one), made = accounts_.rounded(static_cast<int64_t>(storage.nbytes()));
    if (made != nbytes) {
      PyErr_Format(PyExc_AssertionError, "dtrrun: internal error: %s, run again, made %lld bytes in place of %lld",
                   recipe.handle.operator_name().name.c_str(), static_cast<long long>(made),
                   static_cast<long long>(nbytes));
      raise();
    }
    if (c10::Storage emptied = accounts_.memory_of(one)) {
      swap_memory(*emptied.unsafeGetStorageImpl(), *storage.unsafeGetStorageImpl());
      accounts_.restored(one);
    } else if (one == wanted || version.locks.number(one) != 0) {
      Ref object = object_of(storage);
      accounts_.hold_scratch(one, object.get());
    } else {
      return;
    }
    PyObject* self = rematerializer_.get();
    count_.set_number(self, count_.number(self) + 1);
    nbytes_.set_number(self, nbytes_.number(self) + nbytes);
    version.last_access.set_number(one, accounts_.number(ledger.clock));
    if (!accounts_.is_true(ledger.pressure)) return;
    accounts_.rule.left(one);
    if (version.scratch.is_none(one)) accounts_.evictable(one);
  }

  // Counts a run in `Rematerializer.by_operator`.
  void tally(OperatorInfo& info, int64_t cost, int64_t nbytes) {
    Ref name = attribute(info.operator_.get(), "name");
    PyObject* counts = PyDict_GetItem(tallies_.get(), name.get());
    if (counts == nullptr) {
      Ref made = checked(Py_BuildValue("[iii]", 0, 0, 0));
      if (PyDict_SetItem(tallies_.get(), name.get(), made.get()) < 0) raise();
      counts = made.get();
    }
    int64_t more[] = {1, cost, nbytes};
    for (Py_ssize_t i = 0; i < 3; i++)
      PyList_SetItem(counts, i, PyLong_FromLongLong(as_number(PyList_GET_ITEM(counts, i)) + more[i]));
  }

  // The geometries of a signature's tensors, or null if they are for Python. The caller shares them: Python code that
  // runs while room is made may change the budget, and then the table is cleared.
  std::shared_ptr<const std::vector<Geometry>> geometries_of(PyObject* found) {
    auto known = geometries_.find(found);
    if (known == geometries_.end()) {
      Ref tuples = attribute(found, "geometries"), same = attribute(found, "same");
      auto all = std::make_shared<std::vector<Geometry>>(PyTuple_GET_SIZE(tuples.get()));
      bool readable = PyTuple_GET_SIZE(same.get()) == 0;
      for (size_t i = 0; readable && i < all->size(); i++) readable = (*all)[i].read(PyTuple_GET_ITEM(tuples.get(), i));
      if (!readable) all.reset();
      known = geometries_.emplace(found, std::pair(Ref::copy(found), std::move(all))).first;
    }
    return known->second.second;
  }

  Ref python_;
  const Device& device_;
  Ref rematerializer_, tallies_;
  const Workspaces& workspaces_;
  Accounts& accounts_;
  Evictions& evictions_;
  Ambient& ambient_;
  Operators& operators_;
  OperationFields operation;
  VersionFields version;
  SignatureFields signature;
  CounterFields ledger;
  Slot operators_ns_, count_, nbytes_;
  std::unordered_map<PyObject*, std::pair<Ref, std::shared_ptr<const std::vector<Geometry>>>> geometries_;
};

}  // namespace dtrrun
