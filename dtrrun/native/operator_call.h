// One call of an operator (`Interposer::in_full`), as it passes through `describe.h`, `admission.h`, `record.h` and `run_kernel.h`:
// what the core needs from it (`core/operator.h`), and what these files find out.
#pragma once

#include <memory>
#include <optional>
#include <unordered_map>
#include <unordered_set>

#include "arguments.h"
#include "arrival.h"
#include "device.h"
#include "first_calls.h"
#include "operator_table.h"
#include "pytorch.h"
#include "recipe.h"
#include "turns.h"
#include "way_in.h"

namespace dtrrun {

class Anchors;
class Observed;

// Returns true for a plain tensor over a storage on this device.
inline bool is_plain_kind(const at::Tensor& tensor, const Device& device) {
  auto keys = tensor.unsafeGetTensorImpl()->key_set();
  return tensor.layout() == at::kStrided && !tensor.is_quantized() && !keys.has(DispatchKey::NestedTensor) &&
         !keys.has(DispatchKey::ZeroTensor) && device.has(tensor.device());
}

// Returns true if a tensor covers all of its storage.
inline bool covers(const at::Tensor& tensor) {
  return tensor.nbytes() == tensor.storage().nbytes() && tensor.is_non_overlapping_and_dense();
}
// Returns true if overwriting this tensor leaves none of the known content of its storage (`Call::overwrites`).
// target: its version. times: how many of the call's tensors have that version.
template <class Count>
bool overwrites_all(const OperatorInfo& info, const at::Tensor& tensor, const Version* target, const Count& times) {
  if (info.blank && target->pin == pins::UNINITIALISED) return true;
  return info.overwrites && covers(tensor) && times() == 1;
}

// What few calls have: those of operators that `HandlerKind::OTHER` handles, or on tensors of other kinds or devices.
struct Unusual {
  std::string elsewhere;  // the type of another device that results may be on
  int64_t unplain = 0;  // bytes of inputs without a plain storage
  c10::SmallVector<size_t, 2> missing;  // which of its tensors have no version
  c10::SmallVector<size_t, 1> by_value;  // places of numbers on the CPU that a GPU's kernel reads
  c10::SmallVector<int64_t, 4> same;  // for each tensor the first that is the same, if the operator compares them
  std::unique_ptr<Around> around;  // what a replay restores besides the settings
  std::vector<VersionRef> given;  // versions of storages that it was given
  bool counts = false;  // its kernel is not PyTorch's own: what it keeps is found by counting references
  bool is_pure = true;  // its kernel, if it is written in Python, reads nothing that may change
  std::vector<at::Tensor> kept;  // tensors that its kernel has kept
  bool drawn = false;  // it has drawn random numbers, as other threads may have
};

struct OperatorCall final : Call {
  int64_t place = 0;  // of the device on which it runs
  OperatorCall(OperatorInfo& info, Arrival& arrival, Turn& turn, const TensorVersions& tensor_versions, const Device& device)
      : info(info), arrival(arrival), turn(turn), tensor_versions(tensor_versions), device(device) {
    id = reinterpret_cast<int64_t>(this);
    replayable = info.replayable;
    reserves = turn.shared();
    view = info.only_views;
    untouching = info.untouching;
    reshapes = info.reshapes;
    opaque = info.shares_memory;
    uninitialised = info.uninitialised;
    shrinks = info.shrinks;
  }
  ~OperatorCall() {
    for (Version* one : versions) let_go(one);
  }
  OperatorCall(const OperatorCall&) = delete;

  // -- for the core --

  c10::SmallVector<Version*, 6> versions;  // holds references
  c10::SmallVector<Write, 2> written;
  c10::SmallVector<size_t, 2> statistics;
  std::vector<VersionRef> handed_out;
  bool locked = false;
  c10::SmallVector<Version*, 2> changing;

  bool is_leaf(size_t place) const { return writes[place].leaf; }
  // Also asked after the kernel has run, which shrinks an `out` that is too large and leaves the rest of its storage alone.
  bool overwrites(size_t place) const {
    const Written& one = writes[place];
    return one.overwrites && (!one.whole.defined() || covers(one.whole));
  }
  // `addbmm_` may resize what it writes to, and `out` may be resized. Operators on lists never do, and have thousands of tensors.
  std::optional<int64_t> resized(size_t, Version* version) const {
    if (info.handler != HandlerKind::WRITES && info.handler != HandlerKind::OTHER) return std::nullopt;
    int64_t nbytes = tensor_versions.rounded(bytes_of(version));
    return nbytes == version->nbytes ? std::nullopt : std::optional(nbytes);
  }
  void made(int64_t nbytes) {
    if (info.makes_tensors || info.handler == HandlerKind::OTHER)
      signature->learn_bytes(nbytes + counted, info.opaque, info.varies, !device.is_cpu());
  }
  template <class Entries>
  OperationRef record(const Entries& entries) {
    Recorded* one = maker.get();
    if (excludes) one->signature->resemble(*signature);  // the replay has its own signature
    std::unordered_set<const Version*> seen;
    auto is_new = [&](const Version* version) {
      if (versions.size() > FEW) return seen.insert(version).second;
      return one->reads_of(version) == 0;
    };
    bool is_plain = true;  // it reads each of its tensors, and no version twice
    auto read = [&](Version* version) {
      if (is_new(version))
        add_read(one, version);
      else
        is_plain = false;  // as in `x * x`: it is locked, and counts as read, only once
    };
    entries(read, [&](size_t) { is_plain = false; });
    if (!is_plain) one->tensors = std::make_unique<std::vector<TensorEntry>>(tensors_of(entries));
    return std::move(maker);
  }
  void admitted() {}
  void abandoned() {}
  void failed() {}
  inline void finished();
  inline std::unique_ptr<Anchors> about_to_shrink();

  // -- what is found out --

  OperatorInfo& info;
  Arrival& arrival;
  const IValue* const values = arrival.values();  // valid until its kernel runs
  const size_t count = arrival.count;
  Turn& turn;
  const TensorVersions& tensor_versions;
  const Device& device;
  Observed* observed = nullptr;
  bool excludes = false;  // it updates running statistics, which a replay leaves out
  c10::SmallVector<int, 8> holes = c10::SmallVector<int, 8>(count, VALUE);  // as in `Recipe`
  c10::SmallVector<std::pair<size_t, IValue>, 1> gaps;  // which items of a list of tensors are present
  Ref its_signature;
  const KernelState* state = nullptr;  // the settings that its kernel sees
  struct Written {
    size_t place, item;  // of the argument, and within it if that is a list
    bool leaf = false, overwrites = false;
    at::Tensor whole = {};  // what it overwrites, unless that has never been written to
  };
  c10::SmallVector<Written, 2> writes;  // in the order of `written`
  OperationRef maker;  // its recipe, if it will have one
  Ref rng;  // the state of the generator that it draws from
  Ref outputs;  // classified in Python
  int64_t counted = 0;  // bytes of results without a plain storage
  size_t tensors = 0;  // how many it has, with those that have no version
  std::unique_ptr<Unusual> unusual;
  bool is_first = false;  // the first with its signature
  int64_t needed = -1;  // bytes at once, if measured
  std::optional<FirstCalls::Unpriced> unpriced;  // until it has run
  std::optional<Formulas::Lesson> lesson;  // if a formula can learn from it

  bool is_statistics(size_t place) const { return holes[place] == STATISTICS; }
  Unusual& special() {
    if (!unusual) unusual = std::make_unique<Unusual>();
    return *unusual;
  }
  // Calls function(place, tensor) for each tensor that has a version, in order.
  template <class Function>
  void each_tensor(const Function& function) const {
    size_t number = 0;
    auto visit = [&](size_t place, const at::Tensor& tensor) {
      bool is_missing = unusual && std::count(unusual->missing.begin(), unusual->missing.end(), number) != 0;
      number++;
      if (!is_missing) function(place, tensor);
    };
    for (size_t place = 0; place < count; place++) {
      if (holes[place] == VALUE) continue;
      if (holes[place] == TENSOR || holes[place] == STATISTICS) {
        visit(place, values[place].toTensor());
        continue;
      }
      each_tensor_in(values[place], [&](const at::Tensor& tensor) { visit(place, tensor); });
    }
  }
  // Calls function(tensor) for each tensor in a list, which may be nested.
  template <class Function>
  static void each_tensor_in(const IValue& list, const Function& function) {
    for (const IValue& item : list.toListRef()) {
      if (item.isList()) each_tensor_in(item, function);
      if (item.isTensor() && item.toTensor().defined()) function(item.toTensor());
    }
  }

  const IValue& argument(size_t place) const { return values[place]; }
  at::Tensor tensor(const Written& one) const {
    const IValue& value = argument(one.place);
    if (value.isTensor()) return value.toTensor();
    if (holes[one.place] != NESTED) return value.toListRef()[one.item].toTensor();
    at::Tensor found;
    size_t number = 0;
    each_tensor_in(value, [&](const at::Tensor& tensor) {
      if (number++ == one.item) found = tensor;
    });
    return found;
  }
  void add(Version* version) {
    keep(version);
    versions.push_back(version);
  }
  void set_signature(Ref found) {
    its_signature = std::move(found);
    signature = &as_signature(its_signature.get())->figures;
  }

 private:
  static constexpr size_t FEW = 16;

  // Returns the bytes of a version's storage; of one that is on another device, those that the version has.
  int64_t bytes_of(const Version* version) const {
    if (const c10::StorageImpl* storage = as_stored(version)->storage; storage != nullptr && version->pin != pins::OTHER_DEVICE)
      return static_cast<int64_t>(storage->nbytes());
    StorageRef storage = tensor_versions.core.backend->storage_of(version);
    bool is_ours = storage && device.has(as_impl(storage)->device());
    return is_ours ? static_cast<int64_t>(as_impl(storage)->nbytes()) : version->nbytes;
  }
  // Returns its tensors as its recipe lists them.
  template <class Entries>
  std::vector<TensorEntry> tensors_of(const Entries& entries) const {
    std::vector<TensorEntry> found;
    std::unordered_map<size_t, int64_t> blank;  // the first place of each that is overwritten
    auto overwritten = [&](size_t place) {
      auto [first, is_first] = blank.emplace(place, static_cast<int64_t>(found.size()));
      // By how much it has grown, if so, is part of what the operator allocates.
      const Version* target = written[place].target;
      found.push_back({nullptr, target->nbytes, bytes_of(target), is_first ? -1 : first->second});
    };
    entries([&](Version* version) { found.push_back({version}); }, overwritten);
    return found;
  }
};
static_assert(IsCall<OperatorCall>);

}  // namespace dtrrun
