// Finds the versions of a call's tensors and the signature that it shares with calls like it.
#pragma once

#include "callers.h"
#include "fast_call.h"
#include "signatures.h"
#include "way_in.h"

namespace dtrrun {

class Describer {
 public:
  Describer(PyObject* slow_path, const Device& device, TensorVersions& versions, FirstCalls& first_calls)
      : slow_path_(Ref::copy(slow_path)), device_(device), versions_(versions), ledger_(versions.core.ledger),
        first_calls_(first_calls) {}

  Signatures signatures;

  // Returns the signature of calls like this one, or null.
  PyObject* known_signature(FastCall& call) { return describe(call) ? signatures.find(key_) : nullptr; }

  // Finds the signature of a call that has been described. Returns false if it is the first with its signature.
  bool find_signature(FastCall& call) {
    PyObject* known = signatures.find(key_);
    if (known != nullptr) call.set_signature(Ref::copy(known));  // the table may be cleared while the operator runs
    return known != nullptr;
  }
  // Makes the signature of such a call. missed: receives its key. Returns false if the call must be handled in Python.
  bool make_signature(FastCall& call, Key& missed) {
    meet_leaves(call);
    call.is_first = true;
    std::swap(missed, key_);
    const OperatorHandle& op = call.arrival.op;
    int64_t read = 0;
    for (const Version* one : call.versions) read += one->nbytes;
    Ref made = first_calls_.signature_of(call.info, op, call.values, call.versions.size(), !call.statistics.empty(), read, call.lesson);
    if (!made) return false;
    call.set_signature(std::move(made));
    if (call.signature->cost == 0) call.unpriced = first_calls_.unpriced(call.info, op, call.values, read);
    return true;
  }
  // Called after a first call has run.
  void remember(const Key& key, PyObject* found) {
    if (signatures.find(key) != nullptr) return;  // another thread's call was the first
    first_calls_.made(found);
    signatures.add(key, found);
  }

  // Finds the versions of a call's tensors, and makes the key of its signature. Returns false if the call cannot take the
  // fast path.
  bool describe(FastCall& call) {
    const OperatorInfo& info = call.info;
    const auto& arguments = call.arrival.schema().arguments();
    auto has = [&](int place) { return call.argument(place).isTensor() && call.argument(place).toTensor().defined(); };
    call.excludes = info.statistics[0] >= 0 && (has(info.statistics[0]) || has(info.statistics[1])) &&
                    (info.trains < 0 || call.argument(info.trains) == IValue(true));
    key_.clear();
    if (!written_.empty()) written_.clear();
    // Recipes and observers need them.
    offsets_matter_ = info.makes_tensors || info.handler != HandlerKind::PLAIN;
    key_.add(reinterpret_cast<uint64_t>(&info));
    for (size_t place = 0; place < call.count; place++) {
      const IValue& value = call.argument(place);
      bool writes = !info.mutates.empty() && info.writes_to(place);
      if (value.isTensor()) {
        if (!describe(call, place, value.toTensor(), writes, arguments[place].kwarg_only())) return false;
      } else if (value.isList() && value.isTensorList()) {  // isList() is inline
        if (arguments[place].kwarg_only()) return false;
        auto tensors = value.toTensorVector();
        key_.add_list(tensors.size());
        for (size_t item = 0; item < tensors.size(); item++) {
          if (tensors[item].unsafeGetTensorImpl()->is_wrapped_number()) return false;  // in a replay, it would not count as one
          if (!read(call, tensors[item]) || (writes && !write(call, place, item, tensors[item]))) return false;
        }
        call.holes[place] = static_cast<int>(tensors.size());
      } else if (value.isList() && value.isOptionalTensorList()) {  // indices
        if (arguments[place].kwarg_only()) return false;
        c10::List<bool> given;
        for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
          given.push_back(tensor.has_value() && tensor->defined());
          if (given.get(given.size() - 1) && !read(call, *tensor)) return false;
        }
        key_.add(IValue(given));
        call.holes[place] = static_cast<int>(given.size());
        call.gaps.emplace_back(place, std::move(given));
      } else if (info.sized_by_numbers && value.isDouble()) {
        key_.add_size(value.toDouble());
      } else if (!key_.add(value) || (value.isDevice() && !device_.is_meant_by(value.toDevice()))) {
        return false;
      }
    }
    key_.add(static_cast<uint64_t>(c10::typeMetaToScalarType(c10::get_default_dtype())) |
             static_cast<uint64_t>(info.opaque && c10::GradMode::is_enabled()) << 8);
    call.updates_statistics = info.updates && !call.statistics.empty();
    for (size_t place = 0; place < call.writes.size(); place++) {
      const Version* target = call.written[place].target;
      auto times = [&] { return std::count(call.versions.begin(), call.versions.end(), target); };
      FastCall::Written& one = call.writes[place];
      at::Tensor tensor = call.tensor(one);
      one.overwrites = overwrites_all(info, tensor, target, times);
      if (one.overwrites && info.overwrites) one.whole = std::move(tensor);
    }
    return true;
  }

  // Returns the version of a tensor's storage, entered as a constant if it is new; null if it must be handled in Python.
  Version* known_or_adopted(const at::Tensor& tensor) {
    if (Version* known = versions_.of(tensor)) return known;
    if (!tensor.unsafeGetTensorImpl()->has_storage() || !is_plain_kind(tensor, device_)) return nullptr;
    int64_t nbytes = versions_.rounded(static_cast<int64_t>(tensor.storage().nbytes()));
    bool evicts = ledger_.resident_bytes + nbytes > ledger_.limit;
    Anchors anchors(versions_, evicts ? Words::of_foreign_code() : std::vector<uintptr_t>());
    ask("version_of", tensor);
    return versions_.of(tensor);
  }

 private:
  static IValue number_in(const at::Tensor& tensor) {
    switch (tensor.scalar_type()) {
      case at::kLong:
        return *tensor.const_data_ptr<int64_t>();
      case at::kBool:
        return *tensor.const_data_ptr<bool>();
      case at::kDouble:
        return *tensor.const_data_ptr<double>();
      default:
        return IValue(c10::complex<double>());
    }
  }

  bool describe(FastCall& call, size_t place, const at::Tensor& tensor, bool writes, bool kwarg_only) {
    const OperatorInfo& info = call.info;
    auto is_place = [&](int other) { return static_cast<int>(place) == other; };
    if (!tensor.defined()) {
      key_.add(IValue());
    } else if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {  // a number in the program, kept as it is
      if (!tensor.device().is_cpu()) return false;
      key_.add(number_in(tensor));
    } else if (kwarg_only && !writes) {
      return false;
    } else if (call.excludes && (is_place(info.statistics[0]) || is_place(info.statistics[1]))) {
      Version* found = is_plain(tensor) ? versions_.of(tensor) : nullptr;
      if (found == nullptr || found->escaped || !found->resident) return false;
      if (!call.statistics.empty() && call.versions[call.statistics[0]] == found) return false;  // both in one storage
      key_.add(tensor);
      call.holes[place] = STATISTICS;
      call.statistics.push_back(call.versions.size());
      call.add(found);
    } else {
      if (!read(call, tensor) || (writes && !write(call, place, 0, tensor))) return false;
      call.holes[place] = TENSOR;
    }
    return true;
  }
  // Notes that the tensor read last is also written to.
  bool write(FastCall& call, size_t place, size_t item, const at::Tensor& tensor) {
    size_t hole = call.versions.size() - 1;
    Version* target = call.versions[hole];
    bool leaf = is_leaf(tensor);
    if (leaf && target->pin == nullptr) return false;  // must be handled in Python
    if (call.written.size() < FEW) {
      for (const Call::Write& one : call.written)
        if (one.target == target) return true;
    } else {
      if (written_.empty())
        for (const Call::Write& one : call.written) written_.insert(one.target);
      if (!written_.insert(target).second) return true;
    }
    call.written.push_back({target, hole});
    call.writes.push_back({place, item, leaf, false, {}});
    return true;
  }
  bool read(FastCall& call, const at::Tensor& tensor) {
    if (!is_plain(tensor) || !device_.has(tensor.device())) return false;
    Version* found = known_or_adopted(tensor);
    if (found == nullptr || versions_.fingerprints.is_workspace(found)) return false;
    if (found->escaped && call.info.handler != HandlerKind::VIEW) {
      ask("read_escaped", tensor);  // may be followed by another version
      found = versions_.of(tensor);
    }
    key_.add(tensor, offsets_matter_);
    call.add(found);
    return true;
  }

  // What has been computed, and is a leaf of autograd now, is a parameter.
  void meet_leaves(const FastCall& call) const {
    auto meet = [&](const at::Tensor& tensor) {
      if (!tensor.defined() || !tensor.requires_grad() || !is_leaf(tensor)) return;
      Version* found = versions_.of(tensor);
      if (found != nullptr && found->pin == nullptr) ask("meet_leaf", tensor);
    };
    for (const IValue& value : c10::ArrayRef<IValue>(call.values, call.count)) {
      if (value.isTensor()) meet(value.toTensor());
      if (value.isTensorList())
        for (const IValue& item : value.toListRef()) meet(item.toTensor());
    }
  }

  // Calls a method of Python's `SlowPath` with a tensor of the program's.
  void ask(const char* method, const at::Tensor& tensor) const {
    Untraced untraced;
    c10::impl::ExcludeDispatchKeyGuard only_kernels(WayIn::ABOVE);
    Ref object = to_python(tensor.requires_grad() ? IValue(tensor) : shown(tensor), Enumeration::TENSOR);
    checked(PyObject_CallMethod(slow_path_.get(), method, "O", object.get()));
  }

  Ref slow_path_;
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
