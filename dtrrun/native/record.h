// Records the recipe of a call, and finds out what it has made.
#pragma once

#include "operator_call.h"
#include "observers.h"
#include "replays.h"
#include "way_in.h"

namespace dtrrun {

class Recording {
 public:
  Recording(PyObject* python, PyObject* callbacks, const Device& device, TensorVersions& versions)
      : python_(Ref::copy(python)), callbacks_(Ref::copy(callbacks)), device_(device), versions_(versions) {}

  // Saves the arguments of an admitted call for its recipe, if it gets one: its kernel will consume them. is_captured: it becomes a part
  // of a CUDA graph.
  void prepare(OperatorCall& call, bool is_captured) {
    const OperatorInfo& info = call.info;
    bool draws = (info.random || info.foreign) && !is_captured && !(call.unusual && !call.unusual->elsewhere.empty());
    if (draws && (call.recordable || !device_.is_cpu())) capture(call);  // a GPU may run out of memory, and draw again
    if (!call.recordable) return;
    PyObject* func = (call.excludes ? info.replay : info.func).get();
    call.maker = recorded_operation(call.versions.size(), static_cast<uint32_t>(call.count), call.arrival.op, info.enumerations,
                                    func, call.state);
    OperationObject* maker = enclosing(call.maker.get());
    PyObject* found = call.its_signature.get();
    set_signature(maker, call.excludes ? replayed_as(found) : found);
    Recipe* recipe = recipe_of(maker);
    for (size_t place = 0; place < call.count; place++) {
      if (call.holes[place] == VALUE) recipe->values()[place] = call.arrival.kept(call.argument(place));
      recipe->holes()[place] = call.holes[place] == STATISTICS ? VALUE : call.holes[place];
    }
    for (auto& [place, given] : call.gaps) recipe->values()[place] = std::move(given);
    recipe->rng = Ref::copy(call.rng.get());
    if (!call.unusual) return;
    c10::impl::ExcludeDispatchKeyGuard only_kernels(WayIn::ABOVE);
    for (size_t place : call.unusual->by_value) recipe->values()[place] = call.argument(place).toTensor().clone();
    recipe->around = std::move(call.unusual->around);
  }

  using Outputs = c10::SmallVector<NewStorage, 2>;

  // Finds the new storages among the results. Returns true if all results have a plain storage.
  bool outputs_of(OperatorCall& call, Outputs& outputs) {
    if (call.info.takes_storage) return given_storages(call);
    if (call.view || !(call.info.makes_tensors || call.info.handler == HandlerKind::OTHER)) return true;
    if (call.info.is_classified) return classified_in_python(call, outputs);
    auto tensors = call.arrival.tensors();
    bool plain = std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) {
      const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
      return impl->has_storage() && is_plain_kind(tensor, device_) &&
             OwnStorages::can_watch(impl->unsafe_storage().unsafeGetStorageImpl());
    });
    if (!plain) return classified_in_python(call, outputs);
    for (size_t place = 0; place < tensors.size(); place++) {
      Storage* storage = as_storage(tensors[place].unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
      bool is_known = versions_.at(as_impl(storage)) != nullptr ||
                      std::any_of(outputs.begin(), outputs.end(), [&](const NewStorage& one) { return one.storage == storage; });
      if (!is_known) outputs.push_back({static_cast<int64_t>(place), storage, NewStorage::NEW});
    }
    return true;
  }
  // For `--verify`: notes which part of what the call has made is initialised.
  void note_extents(const OperatorCall& call, const Outputs& outputs) const {
    if (!versions_.fingerprints.are_taken() || outputs.empty()) return;
    auto is_workspace = [&](const Version* one) { return one->nbytes != 0 && one->extent == 0; };
    bool reads_one = !call.info.reads_opaque && std::any_of(call.versions.begin(), call.versions.end(), is_workspace);
    auto tensors = call.arrival.tensors();
    for (const NewStorage& one : outputs) {
      Version* version = versions_.at(as_impl(one.storage));
      if (version == nullptr || version->constant()) continue;
      versions_.fingerprints.note(version, tensors[static_cast<size_t>(one.where)]);
      if (one.where == call.info.workspace || reads_one) version->extent = 0;
    }
  }

 private:
  // Captures the state of the generators that a call may draw from.
  void capture(OperatorCall& call) {
    int64_t drawn = call.signature->output_bytes;
    for (const Call::Write& one : call.written) drawn += one.target->nbytes;
    Ref generators = checked(PyList_New(0));
    for (size_t place = 0; place < call.count; place++)
      if (call.argument(place).isGenerator() &&
          PyList_Append(generators.get(), to_python(call.argument(place), Enumeration::NONE).get()) < 0)
        raise();
    const char* method = call.info.foreign ? "capture_all" : "capture";
    call.rng = checked(PyObject_CallMethod(python_.get(), method, "LO", static_cast<long long>(drawn), generators.get()));
  }

  // Returns true, after an operator that has given tensors other storages, which the program may hold.
  bool given_storages(OperatorCall& call) {
    Untraced untraced;
    WithoutFunctionModes plain;
    c10::impl::ExcludeDispatchKeyGuard only_kernels(WayIn::ABOVE);
    Ref result = shown_results(call.arrival.results());
    Ref found = checked(PyObject_CallMethod(callbacks_.get(), "given_storages", "O", result.get()));
    PyObject *given, *handed_out;
    if (!PyArg_ParseTuple(found.get(), "OO", &given, &handed_out)) raise();
    for (PyObject* one : Items(given)) {
      Version* version = native_node(one);
      if (auto nbytes = call.resized(0, version)) versions_.ledger.backend.resized(version, *nbytes);
    }
    call.handed_out = versions_in(handed_out);
    return true;
  }

  bool classified_in_python(OperatorCall& call, Outputs& outputs) {
    Untraced untraced;
    WithoutFunctionModes plain_functions;
    c10::impl::ExcludeDispatchKeyGuard only_kernels(WayIn::ABOVE);
    Ref result = shown_results(call.arrival.results());
    Ref found = checked(PyObject_CallMethod(callbacks_.get(), "classify", "OO", result.get(), call.info.operator_.get()));
    int plain;
    long long counted;
    PyObject* all;
    if (!PyArg_ParseTuple(found.get(), "OLp", &all, &counted, &plain)) raise();
    call.outputs = Ref::copy(all);
    call.counted = counted;
    for (const NewStorage& one : new_storages_in(all)) outputs.push_back(one);
    return plain != 0;
  }

  Ref python_, callbacks_;
  const Device& device_;
  TensorVersions& versions_;
};

}  // namespace dtrrun
