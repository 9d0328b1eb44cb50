// Notes of the program's operators, for `--where` and `--peak`: where each was called, and how much memory the program's tensors
// took after it.
//
// Operators are numbered: the age of a version is the number of its maker. So a note has that number, the code that called the
// operator and the place in it, the module, and the number of an autograd node. Lines are looked up when somebody asks.
// Without notes, an operator costs one comparison.
#pragma once

#include <algorithm>
#include <limits>
#include <unordered_map>
#include <vector>

#include "../bindings/ledger.h"
#include "entries.h"
#include "python_objects.h"

namespace dtrrun {

// One operator. code: an index, or -1 if no code of the program has called it. node: in a backward pass, the number of the node
// that is running; otherwise that of the next one to be made.
struct NotedCall {
  int64_t age, node;
  int32_t code, place, module;
  bool backward;
};

// A storage's time in the ledger. born, died: ages; died is -1 while it lives.
struct NotedStorage {
  int64_t key, nbytes, born, died;
  bool gradient;
};

class CallNotes {
 public:
  static constexpr int LINES = 1, MEMORY = 2, STORAGES = 4;
  static constexpr int64_t NEVER = std::numeric_limits<int64_t>::max();

  // judge: called with a code object, returns whether it is the program's. look: called when there are as many bytes as the target.
  CallNotes(py::object ledger, py::object judge)
      : ledger(std::move(ledger)), judge(std::move(judge)), ledger_(core_of(this->ledger.ptr()).ledger) {}

  py::object ledger, judge, look = py::none();

  int64_t module = 0;       // in which the program is
  int64_t most = 0, most_age = 0;  // the most bytes after an operator, and its number
  int64_t target = NEVER;   // `look` is called when there are so many bytes

  int mode() const { return mode_; }
  void set_mode(int mode) {
    if ((mode & STORAGES) != 0 && (mode_ & STORAGES) == 0) begin_storages();
    mode_ = mode;
  }

  // An operator that is not a view has been called.
  void called() {
    if (mode_ == 0) return;
    if ((mode_ & LINES) != 0) note_place();
    if ((mode_ & MEMORY) != 0) note_memory();
  }
  // The ledger has noticed that a version's storage is gone.
  void died(const Version* one) {
    if ((mode_ & STORAGES) == 0) return;
    auto place = living_.find(one->key);
    if (place == living_.end()) return;
    NotedStorage& its = storages_[place->second];
    its.died = ledger_.age;
    its.gradient = one->pin == pins::GRADIENT;
    living_.erase(place);
  }

  void forget(int64_t age) {
    calls_.erase(calls_.begin(), first_from(age));
    forward_.clear();
    for (size_t place = 0; place < calls_.size(); place++)
      if (!calls_[place].backward) forward_.push_back(place);
  }
  size_t size() const { return calls_.size(); }

  // Returns the operator with this number, or the last one before; null if there is none.
  const NotedCall* at(int64_t age) const {
    auto after = first_from(age + 1);
    return after == calls_.begin() ? nullptr : &*std::prev(after);
  }
  // Returns the operator that has made a node of autograd's graph; null if it is not known.
  const NotedCall* maker_of(int64_t node) const {
    auto found = std::partition_point(forward_.begin(), forward_.end(), [&](size_t place) { return calls_[place].node <= node; });
    return found == forward_.end() ? nullptr : &calls_[*found];
  }
  // Returns the operator of the forward pass to whose node one of a backward pass belongs; otherwise the same.
  const NotedCall* origin(const NotedCall* one) const {
    if (one == nullptr || !one->backward) return one;
    const NotedCall* found = maker_of(one->node);
    return found == nullptr ? one : found;
  }
  // Returns the numbers of the first and the last operator of backward passes; 0 if there are none.
  std::pair<int64_t, int64_t> backward() const {
    auto is_backward = [](const NotedCall& one) { return one.backward; };
    auto first = std::find_if(calls_.begin(), calls_.end(), is_backward);
    if (first == calls_.end()) return {0, 0};
    return {first->age, std::find_if(calls_.rbegin(), calls_.rend(), is_backward)->age};
  }
  PyObject* code_of(const NotedCall& one) const { return one.code < 0 ? nullptr : codes_[static_cast<size_t>(one.code)].get(); }
  const std::vector<NotedStorage>& storages() const { return storages_; }

 private:
  std::vector<NotedCall>::const_iterator first_from(int64_t age) const {
    return std::lower_bound(calls_.begin(), calls_.end(), age, [](const NotedCall& one, int64_t age) { return one.age < age; });
  }

  void note_place() {
    NotedCall one{ledger_.age, node_under_way(), -1, -1, static_cast<int32_t>(module), true};
    if (one.node < 0) {
      one.backward = false;
      one.node = next_node();
    }
    for (Frames::Frame* frame = Frames::newest(); frame != nullptr; frame = Frames::before(frame)) {
      Frames::Place place = Frames::place_of(frame);
      if (place.code == nullptr) continue;
      int32_t code = program_code(place.code);
      if (code < 0) continue;
      one.code = code;
      one.place = place.offset;
      break;
    }
    if (!one.backward) forward_.push_back(calls_.size());
    calls_.push_back(one);
  }
  // Returns the index of the program's code; -1 if it is PyTorch's or ours.
  int32_t program_code(PyCodeObject* code) {
    auto [known, is_new] = numbers_.try_emplace(code, -1);
    if (!is_new) return known->second;
    kept_.push_back(Ref::copy(reinterpret_cast<PyObject*>(code)));  // so that no other gets its address
    Ref found = checked(PyObject_CallOneArg(judge.ptr(), reinterpret_cast<PyObject*>(code)));
    if (found.get() != Py_True) return -1;
    codes_.push_back(Ref::copy(reinterpret_cast<PyObject*>(code)));
    return numbers_[code] = static_cast<int32_t>(codes_.size() - 1);
  }

  void note_memory() {
    if (ledger_.replaying != 0) return;
    if ((mode_ & STORAGES) != 0) note_births();
    int64_t held = ledger_.resident_bytes + ledger_.evicted_bytes - ledger_.scratch_bytes - ledger_.copied_bytes;
    if (held > most) {
      most = held;
      most_age = ledger_.age;
    }
    if (held < target || !look || look.is_none()) return;
    target = NEVER;
    checked(PyObject_CallNoArgs(look.ptr()));
  }
  void begin_storages() {
    storages_.clear();
    living_.clear();
    for (Version* one = ledger_.versions.first(); one != nullptr; one = one->after) note_birth(one, -1);
  }
  // Storages are listed in the order in which they were entered.
  void note_births() {
    size_t before = storages_.size();
    for (Version* one = ledger_.versions.last(); one != nullptr && note_birth(one, ledger_.age); one = one->before) {
    }
    std::reverse(storages_.begin() + static_cast<std::ptrdiff_t>(before), storages_.end());
    for (size_t place = before; place < storages_.size(); place++) living_[storages_[place].key] = place;
  }
  bool note_birth(const Version* one, int64_t age) {
    if (!living_.emplace(one->key, storages_.size()).second) return false;
    storages_.push_back({one->key, one->nbytes, age, -1, false});
    return true;
  }

  Ledger& ledger_;
  int mode_ = 0;
  std::vector<NotedCall> calls_;
  std::vector<size_t> forward_;  // the places of those that are in no backward pass; their nodes' numbers do not decrease
  std::vector<NotedStorage> storages_;
  std::unordered_map<int64_t, size_t> living_;
  std::unordered_map<PyCodeObject*, int32_t> numbers_;
  std::vector<Ref> codes_, kept_;
};

}  // namespace dtrrun
