// Finds the versions of a call's tensors and the signature that it shares with calls like it.
#pragma once

#include <ATen/autocast_mode.h>

#include "callers.h"
#include "operator_call.h"
#include "signatures.h"
#include "way_in.h"

namespace dtrrun {

class Describer {
 public:
  Describer(PyObject* callbacks, const Device& device, TensorVersions& versions, FirstCalls& first_calls)
      : callbacks_(Ref::copy(callbacks)), device_(device), versions_(versions), ledger_(versions.core.ledger),
        first_calls_(first_calls) {}

  Signatures signatures;

  // Finds the signature of a call that has been described. Returns false if it is the first with its signature.
  bool find_signature(OperatorCall& call) {
    PyObject* known = signatures.find(key_);
    if (known != nullptr) call.set_signature(Ref::copy(known));  // the table may be cleared while the operator runs
    return known != nullptr;
  }
  // Makes the signature of such a call. missed: receives its key.
  void make_signature(OperatorCall& call, Key& missed) {
    meet_leaves(call);
    call.is_first = true;
    std::swap(missed, key_);
    int64_t read = call.unusual ? call.unusual->unplain : 0;
    for (const Version* one : call.versions) read += one->nbytes;
    call.set_signature(first_calls_.signature_of(call, read, call.lesson));
    if (call.signature->cost == 0) call.unpriced = first_calls_.unpriced(call.info, call.arrival.op, call.values, read);
  }
  // Called after a first call has run.
  void remember(const Key& key, PyObject* found) {
    if (signatures.find(key) != nullptr) return;  // another thread's call was the first
    first_calls_.made(found);
    signatures.add(key, found);
  }

  // Finds the versions of a call's tensors, and makes the key of its signature.
  void describe(OperatorCall& call) {
    const OperatorInfo& info = call.info;
    const auto& arguments = call.arrival.schema().arguments();
    auto has = [&](int place) { return call.argument(place).isTensor() && call.argument(place).toTensor().defined(); };
    call.excludes = info.statistics[0] >= 0 && (has(info.statistics[0]) || has(info.statistics[1])) &&
                    (info.trains < 0 || call.argument(info.trains) == IValue(true));
    key_.clear();
    if (!written_.empty()) written_.clear();
    // Recipes and observers need them.
    offsets_matter_ = info.makes_tensors || info.handler != HandlerKind::PLAIN;
    key_.add(info.number);
    bool is_placed = false;  // it says that its results are on our device
    for (size_t place = 0; place < call.count; place++) {
      const IValue& value = call.argument(place);
      bool writes = !info.mutates.empty() && info.writes_to(place);
      if (value.isTensor()) {
        describe(call, place, value.toTensor(), writes);
      } else if (are_whole(value)) {
        if (!key_.add(value)) key_.add_other();
      } else if (value.isList() && value.isTensorList()) {  // isList() is inline
        auto items = value.toListRef();
        key_.add_list(items.size());
        call.holes[place] = static_cast<int>(items.size());
        for (size_t item = 0; item < items.size(); item++) {
          const at::Tensor& tensor = items[item].toTensor();
          // In a replay, it would not count as a number; and a recipe has no place for one that is not there.
          if (!tensor.defined() || tensor.unsafeGetTensorImpl()->is_wrapped_number()) call.replayable = false;
          if (tensor.defined())
            read(call, place, item, tensor, writes);
          else
            key_.add_other();
        }
      } else if (value.isList() && value.isOptionalTensorList()) {  // indices
        c10::List<bool> given;
        auto tensors = value.toOptionalTensorVector();
        call.holes[place] = static_cast<int>(tensors.size());
        for (size_t item = 0; item < tensors.size(); item++) {
          given.push_back(tensors[item].has_value() && tensors[item]->defined());
          if (given.get(item)) read(call, place, item, *tensors[item], writes);
        }
        key_.add(IValue(given));
        call.gaps.emplace_back(place, std::move(given));
      } else if (value.isList() && has_tensors(value)) {  // lists of lists, for communication
        call.replayable = false;
        call.holes[place] = NESTED;
        size_t item = 0;
        OperatorCall::each_tensor_in(value, [&](const at::Tensor& tensor) { read(call, place, item++, tensor, writes); });
      } else if (info.sized_by_numbers && value.isDouble()) {
        key_.add_size(value.toDouble());
      } else if (info.sized_by_numbers && value.isComplexDouble()) {
        key_.add_size(value.toComplexDouble().real());
        key_.add_size(value.toComplexDouble().imag());
      } else {
        if (!key_.add(value)) key_.add_other();
        if (value.isDevice() && arguments[place].kwarg_only()) {
          c10::Device device = value.toDevice();
          is_placed = device_.is_meant_by(device);
          if (!is_placed && device.type() == device_.type()) is_placed = joins(device_.meant_by(device)) || !device.has_index();
          if (!is_placed) call.special().elsewhere = device.str();
        }
      }
    }
    key_.add(static_cast<uint64_t>(c10::typeMetaToScalarType(c10::get_default_dtype())) |
             static_cast<uint64_t>(info.opaque && c10::GradMode::is_enabled()) << 8);
    if (call.unusual || call.opaque || info.handler == HandlerKind::OTHER) describe_unusual(call, is_placed);
    call.updates_statistics = info.updates && !call.statistics.empty();
    for (size_t place = 0; place < call.writes.size(); place++) {
      const Version* target = call.written[place].target;
      auto times = [&] { return std::count(call.versions.begin(), call.versions.end(), target); };
      OperatorCall::Written& one = call.writes[place];
      at::Tensor tensor = call.tensor(one);
      one.overwrites = overwrites_all(info, tensor, target, times);
      if (one.overwrites && info.overwrites) one.whole = std::move(tensor);
    }
  }

  // Returns the version of a tensor's storage, entered as a constant if it is new. Returns null if it has no plain
  // storage, or none that can be watched.
  Version* known_or_adopted(const at::Tensor& tensor) {
    if (Version* known = versions_.of(tensor)) return known;
    if (!tensor.unsafeGetTensorImpl()->has_storage() || !is_plain_kind(tensor, device_)) return nullptr;
    c10::StorageImpl* storage = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
    if (OwnStorages::is_counted(storage) && object_in(storage->pyobj_slot()) == nullptr && !is_leaf(tensor)) {
      versions_.core.operators.adopt_counted(as_storage(storage));
      return versions_.of(tensor);
    }
    int64_t nbytes = versions_.rounded(static_cast<int64_t>(tensor.storage().nbytes()));
    bool evicts = ledger_.resident_bytes + nbytes > ledger_.limit;
    Anchors anchors(versions_, evicts ? Words::of_foreign_code() : std::vector<uintptr_t>());
    meet(tensor);
    return versions_.of(tensor);
  }
  // Accounts for a tensor that is new to the session.
  void meet(const at::Tensor& tensor) const { ask("version_of", tensor); }

 private:
  static IValue number_in(const at::Tensor& tensor) {
    switch (tensor.scalar_type()) {
      case at::kLong: return *tensor.const_data_ptr<int64_t>();
      case at::kBool: return *tensor.const_data_ptr<bool>();
      case at::kDouble: return *tensor.const_data_ptr<double>();
      default: return IValue(c10::complex<double>());
    }
  }

  // Returns true for a list of whole numbers: most lists are.
  static bool are_whole(const IValue& value) {
    if (!value.isList()) return false;
    auto items = value.toListRef();
    return !items.empty() && std::all_of(items.begin(), items.end(), [](const IValue& one) { return one.isInt(); });
  }
  static bool has_tensors(const IValue& list) {
    auto items = list.toListRef();
    return std::any_of(items.begin(), items.end(),
                       [](const IValue& one) { return one.isTensorList() || (one.isList() && has_tensors(one)); });
  }

  void describe(OperatorCall& call, size_t place, const at::Tensor& tensor, bool writes) {
    const OperatorInfo& info = call.info;
    auto is_place = [&](int other) { return static_cast<int>(place) == other; };
    if (!tensor.defined()) {
      key_.add(IValue());
    } else if (tensor.unsafeGetTensorImpl()->is_wrapped_number() &&
               tensor.device().is_cpu()) {  // a number in the program, kept as it is
      key_.add(number_in(tensor));
    } else if (!device_.is_cpu() && is_taken_by_value(info, tensor, writes)) {
      key_.add(static_cast<uint64_t>(tensor.scalar_type()));
      key_.add_other();
      call.special().by_value.push_back(place);
    } else if (call.excludes && (is_place(info.statistics[0]) || is_place(info.statistics[1]))) {
      call.holes[place] = STATISTICS;
      call.statistics.push_back(call.versions.size());
      if (!read(call, place, 0, tensor, false)) call.statistics.pop_back();
    } else {
      call.holes[place] = TENSOR;
      if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) call.replayable = false;  // in a replay, it would not count as one
      read(call, place, 0, tensor, writes);
    }
  }
  // Returns true for a number on the CPU that a GPU's kernel reads, at its launch: the program may overwrite it later. Without a copy in
  // the recipe, nothing could be recomputed that has been computed with a scale, a mask value or the seed of an attention's dropout. The
  // copy would not stand for a number, and resolve lazy bits.
  bool is_taken_by_value(const OperatorInfo& info, const at::Tensor& tensor, bool writes) const {
    return tensor.device().is_cpu() && !device_.has(tensor.device()) && tensor.dim() == 0 && tensor.layout() == at::kStrided &&
           !tensor.is_complex() && is_plain(tensor) && !writes && !info.collective &&
           !tensor.unsafeGetTensorImpl()->is_wrapped_number();
  }
  // Notes that the tensor read last is also written to.
  void write(OperatorCall& call, size_t place, size_t item, const at::Tensor& tensor) {
    size_t hole = call.versions.size() - 1;
    Version* target = call.versions[hole];
    bool leaf = is_leaf(tensor);
    if (leaf && target->pin == nullptr) ask("meet_leaf", tensor);
    if (call.written.size() < FEW) {
      for (const Call::Write& one : call.written)
        if (one.target == target) return;
    } else {
      if (written_.empty())
        for (const Call::Write& one : call.written) written_.insert(one.target);
      if (!written_.insert(target).second) return;
    }
    call.written.push_back({target, hole});
    call.writes.push_back({place, item, leaf, false, {}});
  }
  // Returns false if the tensor has no plain storage.
  bool read(OperatorCall& call, size_t place, size_t item, const at::Tensor& tensor, bool writes) {
    Version* found = version_of(call, tensor);
    call.tensors++;
    if (found == nullptr) {
      key_.add_other();
      return false;
    }
    key_.add(tensor, offsets_matter_);
    call.add(found);
    if (writes) write(call, place, item, tensor);
    return true;
  }
  // Returns the version that a call reads if it is given this tensor; null if that has no plain storage.
  Version* version_of(OperatorCall& call, const at::Tensor& tensor) {
    Version* found = is_plain(tensor) && device_.has(tensor.device()) ? known_or_adopted(tensor) : nullptr;
    if (found == nullptr && (found = unusual_version_of(call, tensor)) == nullptr) return nullptr;
    if (found->escaped && !call.info.views) {
      ask("read_escaped", tensor);  // may be followed by another version
      found = versions_.find(tensor);
    }
    return found;
  }
  Version* unusual_version_of(OperatorCall& call, const at::Tensor& tensor) {
    Unusual& special = call.special();
    if (tensor.device().type() != device_.type() && special.elsewhere.empty()) special.elsewhere = tensor.device().str();
    Anchors anchors(versions_, ledger_.budget_bytes >= 0 ? Words::of_foreign_code() : std::vector<uintptr_t>());
    Ref known = ask("version_of", tensor);
    if (known.get() != Py_None) return native_node(known.get());
    call.opaque = true;
    special.unplain += as_number(ask("count", tensor).get());
    special.missing.push_back(call.tensors);
    return nullptr;
  }

  void describe_unusual(OperatorCall& call, bool is_placed) {
    const OperatorInfo& info = call.info;
    Unusual& special = call.special();
    if (is_placed) special.elsewhere.clear();
    if (call.opaque && !info.collective) {
      call.written.clear();
      call.writes.clear();
    }
    if (info.compares_tensors) {
      std::vector<const c10::TensorImpl*> all;
      call.each_tensor([&](size_t, const at::Tensor& tensor) {
        const c10::TensorImpl* one = tensor.unsafeGetTensorImpl();
        special.same.push_back(std::find(all.begin(), all.end(), one) - all.begin());
        key_.add(static_cast<uint64_t>(special.same.back()));
        all.push_back(one);
      });
    }
    if (!special.elsewhere.empty()) key_.add(IValue(special.elsewhere));
    if (!special.elsewhere.empty() || call.opaque) call.replayable = false;
    if (info.calls_others) note_autocast(special);
    if (info.foreign) look_into(call, special);
  }
  // Notes the autocast state of the operators that a kernel calls.
  static void note_autocast(Unusual& special) {
    constexpr std::pair<c10::DeviceType, DispatchKey> ALL[] = {{c10::DeviceType::CPU, DispatchKey::AutocastCPU},
                                                               {c10::DeviceType::CUDA, DispatchKey::AutocastCUDA}};
    for (auto [type, key] : ALL) {
      if (c10::impl::tls_is_dispatch_key_excluded(key)) continue;
      if (!special.around) special.around = std::make_unique<Around>();
      special.around->autocast.emplace_back(type, at::autocast::get_autocast_dtype(type));
    }
  }
  // Asks about a kernel that is not PyTorch's own.
  void look_into(OperatorCall& call, Unusual& special) const {
    Untraced untraced;
    c10::impl::ExcludeDispatchKeyGuard only_kernels(WayIn::ABOVE);
    PyObject *func = call.info.func.get(), *operator_ = call.info.operator_.get();
    Ref found = checked(PyObject_CallMethod(callbacks_.get(), "about_kernel", "OO", func, operator_));
    int is_replayable, counts, is_pure;
    PyObject* reading;
    if (!PyArg_ParseTuple(found.get(), "pppO", &is_replayable, &counts, &is_pure, &reading)) raise();
    call.replayable = call.replayable && is_replayable != 0 && is_pure != 0 && !(call.turn.shared() && !call.written.empty());
    special.counts = counts != 0;
    special.is_pure = is_pure != 0;
    if (reading == Py_None) return;
    if (!special.around) special.around = std::make_unique<Around>();
    special.around->reading = Ref::copy(reading);
  }

  // What has been computed, and is a leaf of autograd now, is a parameter.
  void meet_leaves(const OperatorCall& call) const {
    call.each_tensor([&](size_t, const at::Tensor& tensor) {
      if (!tensor.requires_grad() || !is_leaf(tensor)) return;
      Version* found = versions_.find(tensor);
      if (found != nullptr && found->pin == nullptr) ask("meet_leaf", tensor);
    });
  }

  // Lets the session use another GPU, too, which an operator names, if it may.
  bool joins(c10::Device device) const {
    if (device_.is_modelled()) return false;
    Untraced untraced;
    WithoutFunctionModes plain;
    c10::impl::ExcludeDispatchKeyGuard only_kernels(WayIn::ABOVE);
    return checked(PyObject_CallMethod(callbacks_.get(), "joins", "i", static_cast<int>(device.index()))).get() == Py_True;
  }
  // Calls a method of Python's `Callbacks` with a tensor of the program's.
  Ref ask(const char* method, const at::Tensor& tensor) const {
    Untraced untraced;
    WithoutFunctionModes plain;
    c10::impl::ExcludeDispatchKeyGuard only_kernels(WayIn::ABOVE);
    bool is_shown = !tensor.requires_grad() && is_plain(tensor);
    Ref object = to_python(is_shown ? shown(tensor) : IValue(tensor), Enumeration::TENSOR);
    return checked(PyObject_CallMethod(callbacks_.get(), method, "O", object.get()));
  }

  Ref callbacks_;
  const Device& device_;
  TensorVersions& versions_;
  Ledger& ledger_;
  FirstCalls& first_calls_;
  static constexpr size_t FEW = 8;
  std::unordered_set<const Version*> written_;  // versions that the present call writes to, if there are many
  Key key_;
  bool offsets_matter_ = true;
};

}  // namespace dtrrun
