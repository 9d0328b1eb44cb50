// Replay of a schedule under a budget, with the paper's semantics (App. C.4 and C.5).
//
// A view is destroyed together with its storage's memory and has to be recomputed like any other tensor. Memory is the sum of the
// storages' sizes, without an allocator; the clock is the total cost of the operators that were run. Storages, tensors and
// operators are numbered in the order in which they are added.
#pragma once

#include <deque>
#include <string>

#include "../policy/policy.h"

namespace dtrrun {

// What becomes of a storage when the program's last reference to it is released (App. C.5).
//
// Banishing evicts it permanently. It must have no evicted dependents, since they would need it. Its resident dependents could
// never be recomputed without it, so they are pinned until they are banished themselves. If it has evicted dependents, banishing
// is tried again whenever one of them is rematerialized or banished; until then it is an ordinary storage and may be evicted.
// Constants can be banished, too. A view of a resident storage may be undefined; it then counts as an evicted dependent of what
// its operator reads.
enum class DeallocationPolicy { EAGER, BANISH, IGNORE };

// The state of a replay. OOM: nothing was left to evict. THRASH: more was recomputed than the limit allows.
enum class Status { OK, OOM, THRASH };

class Replay {
 public:
  using Number = uint32_t;
  using Numbers = std::vector<Number>;

  struct Storage : Node {
    Number name;
    Operation recipe{nullptr, 0};
    std::vector<Node*> reads;  // inputs of the operators that made its tensors, without constants
    std::vector<Number> tensors;  // the first one is its root, the others are views
    int64_t locks = 0;
    bool pinned = false;
    bool waits = false, banished = false;  // waits: to be banished
    Numbers readers;  // tensors computed from it; noted only for banishing

    Storage(Number name, int64_t bytes) : Node{}, name(name) {
      kept = 1;  // by the replay
      nbytes = bytes;
      operation = &recipe;
    }
    ~Storage() { forget_policy(); }
    Storage(const Storage&) = delete;
  };
  struct Tensor {
    Storage* storage;
    int64_t nbytes;  // 0: a view
    bool defined = false;
    Number maker = 0;
  };
  struct Operator {
    std::string name;
    int64_t cost, nbytes, peak_bytes;  // the peak includes what it needs while it runs, in addition to its outputs
    Numbers inputs, outputs;
    bool is_constant;
  };
  // A schedule, which several replays can run. Everything is listed by number.
  struct Schedule {
    std::vector<int64_t> nbytes;  // of the storages
    std::vector<std::pair<Number, int64_t>> tensors;  // the storage, and the bytes: 0 for a view
    std::vector<std::shared_ptr<const Operator>> operators;
  };
  struct Options {
    int64_t budget;  // bytes; INT64_MAX: none
    double limit;  // on the time spent in recomputation
    bool requeue;  // reinsert storages into the pool once they are unlocked, as in the paper: only ties differ
    DeallocationPolicy deallocation;
  };
  enum class Event { RUN, COMPUTE, EVICT };
  // Notified, with the number, of each operator that is about to run and each storage whose memory was allocated or freed.
  using Observer = std::function<void(Event, Number)>;

  Replay(Heuristic heuristic, Policy::Options search, Options options, Observer observer)
      : policy(std::move(heuristic), std::move(search)), options_(options), observer_(std::move(observer)) {}
  ~Replay() { policy.clear(); }  // it refers to storages
  Replay(const Replay&) = delete;

  Policy policy;
  int64_t memory = 0, peak_bytes = 0, clock = 0;
  int64_t evictions = 0, chosen = 0;  // chosen: evictions that made room; the others are deallocations
  int64_t rematerializations = 0, recomputed = 0;
  int64_t age = 0;  // how many operators the program has run
  std::deque<Number> made_last;  // the storages made most recently, newest first

  Number add_storage(int64_t nbytes) {
    storages_.emplace_back(static_cast<Number>(storages_.size()), nbytes);
    return storages_.back().name;
  }
  // nbytes: 0 for a view.
  Number add_tensor(Number storage, int64_t nbytes) {
    tensors_.push_back({&storages_.at(storage), nbytes});
    return static_cast<Number>(tensors_.size() - 1);
  }
  Number add_operator(std::string name, int64_t cost, Numbers inputs, Numbers outputs, int64_t workspace, bool is_constant) {
    int64_t nbytes = 0;
    for (Number one : inputs) tensors_.at(one);
    for (Number one : outputs) nbytes += tensors_.at(one).nbytes;
    return add(std::make_shared<Operator>(
        Operator{std::move(name), cost, nbytes, nbytes + workspace, std::move(inputs), std::move(outputs), is_constant}));
  }
  void add(const Schedule& schedule) {
    for (int64_t nbytes : schedule.nbytes) add_storage(nbytes);
    for (auto [storage, nbytes] : schedule.tensors) add_tensor(storage, nbytes);
    for (const auto& one : schedule.operators) add(one);
  }
  const Storage& storage(Number number) const { return storages_.at(number); }
  const std::string& maker_of(const Storage& storage) const { return operators_[tensors_[storage.tensors[0]].maker]->name; }

  // Runs an operator of the program itself.
  Status call(Number number) {
    const Operator& op = *operators_.at(number);
    for (Number output : op.outputs) enter(output, number);
    Status status = materialize(number, op.outputs[0], /*again=*/false);
    if (status != Status::OK) return status;
    age++;
    for (Number output : op.outputs) {
      Storage& made = *tensors_[output].storage;
      made.last_access = clock;
      if (made.tensors[0] != output) continue;
      made.age = age;
      made_last.push_front(made.name);
      if (made_last.size() > LOOKED_AT) made_last.pop_back();
    }
    if (op.is_constant) {
      Storage& made = *tensors_[op.outputs[0]].storage;
      made.operation = nullptr;
      pin(made);
    }
    return Status::OK;
  }

  // Called when the program has released its last reference to a storage.
  void release(Number number) {
    Storage& storage = storages_.at(number);
    if (options_.deallocation == DeallocationPolicy::IGNORE) return;
    storage.released = true;
    if (options_.deallocation == DeallocationPolicy::EAGER) {
      if (storage.resident && !storage.pinned) evict(storage);
      return;
    }
    policy.cost_changed(&storage);  // it may stay in the pool with another score
    waiting_ += !std::exchange(storage.waits, true);
    try_to_banish({&storage});
  }

  // Enforces the output condition (App. C.6): what is alive at the end must be resident, and stay so.
  Status keep(Number number) {
    Tensor& tensor = tensors_.at(number);
    if (!tensor.defined) {
      Status status = materialize(tensor.maker, number, /*again=*/true);
      if (status != Status::OK) return status;
    }
    if (!tensor.storage->pinned) pin(*tensor.storage);
    return Status::OK;
  }

 private:
  static constexpr size_t LOOKED_AT = 64;  // as in core/foresight.py

  Number add(std::shared_ptr<const Operator> op) {
    auto number = static_cast<Number>(operators_.size());
    for (Number output : op->outputs) tensors_[output].maker = number;
    operators_.push_back(std::move(op));
    return number;
  }

  // Enters a new tensor: its storage's cost and dependencies grow by its operator's (App. C.2).
  void enter(Number output, Number number) {
    const Operator& op = *operators_[number];
    Storage& storage = *tensors_[output].storage;
    if (storage.tensors.empty() || tensors_[storage.tensors.back()].maker != number)  // tensors of one operator are consecutive
      storage.cost += op.cost;
    storage.tensors.push_back(output);
    for (size_t i = 0; i < op.inputs.size(); i++) {
      Storage* source = tensors_[op.inputs[i]].storage;
      if (source == &storage) continue;
      if (options_.deallocation == DeallocationPolicy::BANISH && is_first(op, i)) source->readers.push_back(output);
      auto& reads = storage.reads;
      if (!source->constant() && std::find(reads.begin(), reads.end(), source) == reads.end()) reads.push_back(source);
    }
    storage.recipe = {storage.reads.data(), static_cast<uint32_t>(storage.reads.size())};
    if (storage.resident) policy.cost_changed(&storage);
  }
  // Returns whether no earlier input has the same storage.
  bool is_first(const Operator& op, size_t place) const {
    for (size_t i = 0; i < place; i++)
      if (tensors_[op.inputs[i]].storage == tensors_[op.inputs[place]].storage) return false;
    return true;
  }

  struct Frame {
    Number number, wanted;  // an operator, and its output that is needed
    Numbers missing;  // inputs to rematerialize, the first one last
  };
  Frame frame(Number number, Number wanted) {
    Frame made{number, wanted, {}};
    for (Number input : operators_[number]->inputs) {
      Tensor& tensor = tensors_[input];
      tensor.storage->last_access = clock;
      if (tensor.defined)
        tensor.storage->locks++;
      else
        made.missing.push_back(input);
    }
    std::reverse(made.missing.begin(), made.missing.end());
    return made;
  }
  // Runs an operator after rematerializing its inputs. again: it has run before.
  Status materialize(Number number, Number wanted, bool again) {
    std::vector<Frame> stack{frame(number, wanted)};
    while (!stack.empty()) {
      Frame& top = stack.back();
      bool deeper = false;
      while (!deeper && !top.missing.empty()) {
        Number source = top.missing.back();
        deeper = !tensors_[source].defined;  // a sibling's rematerialization may have brought it back
        if (deeper) {
          stack.push_back(frame(tensors_[source].maker, source));
        } else {
          tensors_[source].storage->locks++;
          top.missing.pop_back();
        }
      }
      if (deeper) continue;
      Frame ready = std::move(stack.back());
      stack.pop_back();
      Status status = compute(ready.number, ready.wanted, again || !stack.empty());
      if (status != Status::OK) return status;
      unlock(operators_[ready.number]->inputs);
    }
    return Status::OK;
  }
  void unlock(const Numbers& inputs) {
    for (Number input : inputs) {
      Storage& storage = *tensors_[input].storage;
      storage.locks--;
      if (!options_.requeue || storage.locks != 0) continue;
      policy.discard(&storage);
      policy.insert(&storage);
    }
    if (waiting_ == 0) return;
    std::vector<Storage*> pending;  // a dependent of these may have been rematerialized
    for (Number input : inputs) pending.push_back(tensors_[input].storage);
    try_to_banish(std::move(pending));
  }

  Status compute(Number number, Number wanted, bool again) {
    const Operator& op = *operators_[number];
    tell(Event::RUN, number);
    if (memory + op.peak_bytes > options_.budget && !make_room(op.peak_bytes)) return Status::OOM;
    peak_bytes = std::max(peak_bytes, memory + op.peak_bytes);
    clock += op.cost;
    memory += op.nbytes;
    for (Number output : op.outputs)
      if (output != wanted) give(output, again);
    give(wanted, again);  // the needed output is made last
    if (!again) return Status::OK;
    rematerializations++;
    recomputed += op.cost;
    return static_cast<double>(recomputed) > options_.limit ? Status::THRASH : Status::OK;
  }
  void give(Number output, bool again) {
    Tensor& tensor = tensors_[output];
    if (tensor.defined) {
      memory -= tensor.nbytes;  // recomputed needlessly: freed at once
      return;
    }
    tensor.defined = true;
    Storage& storage = *tensor.storage;
    if (storage.resident) return;
    storage.resident = true;
    if (again) policy.left(&storage);
    policy.insert(&storage);
    tell(Event::COMPUTE, storage.name);
  }
  bool make_room(int64_t nbytes) {
    while (memory + nbytes > options_.budget) {
      KeptNode victim = policy.select(clock, [](Node* node) { return static_cast<Storage*>(node)->locks == 0; });
      if (!victim) return false;
      chosen++;
      evict(*static_cast<Storage*>(victim.get()));
    }
    return true;
  }
  void evict(Storage& storage) {
    storage.resident = false;
    evictions++;
    memory -= storage.nbytes;
    for (Number tensor : storage.tensors) tensors_[tensor].defined = false;
    policy.evicted(&storage);
    tell(Event::EVICT, storage.name);
  }
  void pin(Storage& storage) {
    storage.pinned = true;
    storage.locks++;
    policy.discard(&storage);
  }

  void try_to_banish(std::vector<Storage*> pending) {
    while (!pending.empty()) {
      Storage& storage = *pending.back();
      pending.pop_back();
      bool is_needed =
          std::any_of(storage.readers.begin(), storage.readers.end(), [&](Number reader) { return !tensors_[reader].defined; });
      if (!storage.waits || is_needed) continue;
      storage.waits = false;
      waiting_--;
      for (Number tensor : storage.tensors)  // its inputs may have one evicted dependent fewer
        for (Number input : operators_[tensors_[tensor].maker]->inputs) pending.push_back(tensors_[input].storage);
      banish(storage);
    }
  }
  void banish(Storage& storage) {
    storage.banished = true;
    if (storage.resident) {
      storage.resident = false;
      evictions++;
      memory -= storage.nbytes;
      policy.discard(&storage);
      tell(Event::EVICT, storage.name);
    } else {
      policy.left(&storage);
    }
    for (Number tensor : storage.tensors) tensors_[tensor].defined = true;  // if a sibling's replay makes it, it is freed at once
    for (Number reader : std::exchange(storage.readers, {})) {
      Storage& dependent = *tensors_[reader].storage;
      if (dependent.banished || dependent.pinned) continue;
      dependent.operation = nullptr;
      pin(dependent);
    }
  }

  void tell(Event event, Number number) const {
    if (observer_) observer_(event, number);
  }

  const Options options_;
  const Observer observer_;
  std::deque<Storage> storages_;  // a deque, since their addresses must not change
  std::vector<Tensor> tensors_;
  std::vector<std::shared_ptr<const Operator>> operators_;
  int64_t waiting_ = 0;  // how many storages wait to be banished
};

}  // namespace dtrrun
