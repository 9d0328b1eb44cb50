// Takes down the recipe of a call on the fast path, and enters what it has made.
#pragma once

#include <unordered_map>
#include <unordered_set>

#include "fast_call.h"
#include "observers.h"
#include "way_in.h"

namespace dtrrun {

class Recording {
 public:
  Recording(PyObject* python, PyObject* slow_path, const Device& device, TensorVersions& versions)
      : python_(Ref::copy(python)), slow_path_(Ref::copy(slow_path)), device_(device), versions_(versions) {}

  // Takes down the call's recipe, if it can have one. Returns false if that is not for the fast path.
  bool record(FastCall& call) {
    const OperatorInfo& info = call.info;
    PyObject *found = call.signature.get(), *func = info.func.get();
    if (call.excludes) {
      func = info.replay.get();
      found = replayed_as(found);
      if (found == nullptr) return false;
    }
    if (info.random && (call.has_recipe() || !device_.is_cpu())) {  // a GPU may find no memory, and draw again
      int64_t drawn = signature.output_bytes.number(call.signature.get());
      for (const auto& one : call.targets) drawn += version.nbytes.number(one.target);
      Ref generator = generator_of(call);
      call.rng = checked(PyObject_CallMethod(python_.get(), "capture", "LO", static_cast<long long>(drawn), generator.get()));
    }
    if (!call.has_recipe()) return true;
    bool repeats = reads_twice(call.inputs);
    bool overwrites = std::any_of(call.targets.begin(), call.targets.end(), [](const auto& one) { return one.overwrites; });
    call.maker = blank_recorded_operation(call.inputs.size(), call.count);
    OperationObject* maker = as_operation(call.maker.get());
    set_signature(maker, found);
    if (repeats || overwrites) maker->operation.tensors = std::make_unique<std::vector<TensorEntry>>(entries_of(call));
    std::unordered_set<PyObject*> read;
    for (size_t i = 0; i < call.inputs.size(); i++) {
      if (overwrites && maker->operation.tensors->at(i).version == nullptr)
        call.overwritten.push_back(std::move(call.inputs[i]));
      else if (!repeats || read.insert(call.inputs[i].get()).second)
        add_read(maker, call.inputs[i].release());
    }
    call.inputs.clear();
    auto* recipe = new (maker->operation.end()) Recipe(call.op, info.enumerations, func, call.state.get(), call.count);
    maker->has_recipe = true;
    for (size_t place = 0; place < call.count; place++) {
      if (call.holes[place] == VALUE) recipe->values()[place] = to_keep(call.argument(place));
      recipe->holes()[place] = call.holes[place] == STATISTICS ? VALUE : call.holes[place];
    }
    for (auto& [place, given] : call.gaps) recipe->values()[place] = std::move(given);
    recipe->rng = Ref::copy(call.rng.get());
    return true;
  }

  // Enters the new storages among the results.
  void enter(FastCall& call, PyObject* found) {
    OperatorInfo& info = call.info;
    const Stack& stack = *call.stack;
    size_t count = call.op.schema().returns().size(), first = stack.size() - count;
    auto tensors = tensors_in(call.op.schema(), stack);
    bool writes = !call.targets.empty(), single = count == 1 && stack[first].isTensor() && !writes;
    bool plain = std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) {
      const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
      return impl->has_storage() && is_plain_kind(tensor, device_) &&
             WatchedStorage::can_watch(impl->unsafe_storage().unsafeGetStorageImpl());
    });
    if (!plain) {
      if (writes) throw std::runtime_error("dtrrun: internal error: an operator in place made an unusual tensor");
      enter_in_python(call, found);
      return;
    }
    PyObject* maker = info.uninitialised ? nullptr : call.maker.get();
    bool any = writes;  // whether a version has the recipe
    int64_t total = 0;
    for (size_t place = 0; place < tensors.size(); place++) {
      const at::Tensor& tensor = tensors[place];
      c10::StorageImpl* storage = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
      if (versions_.at(storage) != nullptr) continue;
      if (maker != nullptr && !std::exchange(any, true)) mark_used(maker);
      Ref made = versions_.enter(storage, maker, signature.cost.number(found), pins::UNINITIALISED);
      if (maker != nullptr) versions_.fingerprints.note(made.get(), tensor);
      total += version.nbytes.number(made.get());
      if (!single) call.made.emplace_back(static_cast<Py_ssize_t>(place), std::move(made));
    }
    if (!single && !tensors.empty() && any) set_outputs(maker, call.made);
    int64_t expected = signature.output_bytes.number(found);  // on a GPU with its workspace
    if (signature.guessed.is_true(found) && total == expected) {
      signature.guessed.set(found, false);
    } else if (signature.guessed.is_true(found) ||
               (!single && !tensors.empty() && (device_.is_cpu() ? total != expected : total > expected))) {
      checked(PyObject_CallMethod(python_.get(), "learn", "OOL", found, info.operator_.get(), total));
    }
  }

  static void set_outputs(PyObject* maker, const c10::SmallVector<std::pair<Py_ssize_t, Ref>, 2>& made) {
    if (made.size() == 1) {
      recorded_in(maker)->where = made[0].first;
      return;
    }
    std::vector<Output> outputs;
    for (const auto& [where, one] : made) outputs.push_back({where, WeakVersion(node_of(one.get()))});
    dtrrun::set_outputs(*recorded_in(maker), std::move(outputs));
  }

 private:
  static constexpr size_t FEW = 16;

  // The generator that a call was given, or None.
  static Ref generator_of(const FastCall& call) {
    for (size_t place = 0; place < call.count; place++)
      if (call.argument(place).isGenerator()) return to_python(call.argument(place), Enumeration::NONE);
    return Ref::copy(Py_None);
  }

  // Its tensors, as its recipe has them: what it overwrites is not read.
  std::vector<TensorEntry> entries_of(const FastCall& call) const {
    std::vector<TensorEntry> entries;
    std::unordered_map<PyObject*, int64_t> blank;  // where each that is overwritten comes first
    for (const auto& one : call.targets)
      if (one.overwrites) blank.emplace(one.target, -1);
    for (const Ref& input : call.inputs) {
      auto found = blank.find(input.get());
      if (found == blank.end()) {
        entries.push_back({node_of(input.get())});
        continue;
      }
      auto place = static_cast<int64_t>(entries.size()), first = found->second;
      if (first < 0) found->second = place;
      auto size = static_cast<int64_t>(as_stored(input.get())->storage->nbytes());
      entries.push_back({nullptr, version.nbytes.number(input.get()), size, first});
    }
    return entries;
  }

  // Whether some version is among these more than once, as in `x * x`. It is locked, and counts as read, only once.
  static bool reads_twice(const c10::SmallVector<Ref, 6>& versions) {
    if (versions.size() < FEW) {
      for (size_t i = 1; i < versions.size(); i++)
        for (size_t before = 0; before < i; before++)
          if (versions[before].get() == versions[i].get()) return true;
      return false;
    }
    std::unordered_set<PyObject*> seen;
    return !std::all_of(versions.begin(), versions.end(), [&](const Ref& one) { return seen.insert(one.get()).second; });
  }

  // The signature of a replay without the running statistics (`TensorCall.replay_signature`): borrowed, or null.
  PyObject* replayed_as(PyObject* found) {
    PyObject* kept = signature.replayed_as.get(found);
    if (kept == Py_None) return nullptr;
    signature.cost.set_number(kept, signature.cost.number(found));
    signature.guessed.set(kept, signature.guessed.is_true(found));
    signature.output_bytes.set_number(kept, signature.output_bytes.number(found));
    return kept;
  }

  void enter_in_python(FastCall& call, PyObject* found) {
    Untraced untraced;
    c10::impl::ExcludeDispatchKeyGuard only_kernels(way_in.above);
    const Recipe& recipe = *recipe_of(call.maker.get());
    Ref recorded = as_sequence(recipe), result = results(call.op.schema(), *call.stack);
    Ref tensors = attribute(call.maker.get(), "tensors");
    call.outputs = checked(PyObject_CallMethod(
        slow_path_.get(), "enter", "OOOOOOOOO", result.get(), call.info.func.get(), call.info.operator_.get(), found,
        PyTuple_GET_ITEM(recorded.get(), 1), PyTuple_GET_ITEM(recorded.get(), 2), tensors.get(), call.state.get(),
        call.rng ? call.rng.get() : Py_None));
  }

  Ref python_, slow_path_;
  const Device& device_;
  TensorVersions& versions_;
  VersionFields version;
  SignatureFields signature;
};

}  // namespace dtrrun
