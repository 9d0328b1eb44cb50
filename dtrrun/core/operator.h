// One operator of the program, from before it runs until its outputs are in the ledger (Sec. 2, figure 1).
//
// Its inputs are made resident and locked, room is made for what it will allocate, and it runs. Then its outputs are entered with
// its recipe, and the inputs are unlocked. A session does this with tensors (`native/operator_call.h`), the simulator with the contents
// of a log.
#pragma once

#include <array>
#include <concepts>

#include "mutation.h"

namespace dtrrun {

constexpr int64_t SMALL_CONSTANT = 512;  // bytes

// A storage that an operator has made and that was not in the ledger before. NEW: can be evicted if the operator has a recipe.
// UNTRACKED: not a plain tensor over a storage, so it is neither evicted nor recomputed from. READ_NATIVELY: code that is not an
// operator reads it, so it stays in memory. ELSEWHERE: on another device. FOREIGN: its memory is not from our allocator.
struct NewStorage {
  enum Kind { NEW, UNTRACKED, READ_NATIVELY, ELSEWHERE, FOREIGN };
  int64_t where;  // index of its tensor among the results
  Storage* storage;  // kept alive by the caller
  Kind kind;
};

// What is known about an operator call in progress (`core.operator.Call` in Python). A hole is a tensor's index among the tensor arguments.
struct Call {
  struct Write {
    Version* target;
    size_t hole;  // the first one through which the target is written to
    bool constant = false;  // whether the target was a constant before the write
  };

  int64_t id = 0;  // identifies the call until it is over
  Signature* signature = nullptr;
  int64_t cost = 0;  // ns, once it has run
  bool replayable = true;  // the operator and its arguments allow a replay
  bool recordable = true;  // it gets a recipe; known once it is admitted
  bool reserves = true;  // other operators may run at the same time, and must not take the room made for this one
  bool view = false;  // its results are views: nothing is entered, and recreating them is free
  bool untouching = false;  // it does not read its inputs' memory
  bool reshapes = false;  // it may change which memory a storage has
  bool opaque = false;  // an input has no plain storage
  bool uninitialised = false;  // its results are uninitialised
  bool shrinks = false;  // it may have allocated more than predicted
  bool updates_statistics = false;  // this call updates the running statistics
};

// What each kind of call provides in addition. These run for every operator of a program, so there are no virtual functions.
template <class C>
concept IsCall = std::derived_from<C, Call> && requires(C call, size_t place, Version* version, int64_t nbytes) {
  call.versions;  // `Version*`s of its tensor arguments, by hole; kept alive by the call
  call.written;  // `Write`s, one for each version written to
  call.statistics;  // holes of running statistics, which a replay neither reads nor updates
  call.handed_out;  // `VersionRef`s that other code can reach once the call has run
  // What the call holds until it is over:
  { call.locked } -> std::convertible_to<bool>;  // whether its versions are locked
  call.changing.emplace_back(version);  // constants about to be written to: until then, nothing else may come to depend on them
  // place: an index into `written`.
  { call.is_leaf(place) } -> std::same_as<bool>;  // a leaf of autograd, written through that leaf
  { call.overwrites(place) } -> std::same_as<bool>;  // all of it, without reading it
  // The bytes that a version takes after being written to through this hole; nullopt if unchanged.
  { call.resized(place, version) } -> std::same_as<std::optional<int64_t>>;
  call.made(nbytes);  // this many bytes of its results are new
  // `call.record(entries)` returns its recipe. entries(read, overwritten) visits each of its tensors that a replay needs, in
  // order: it calls read(version), or overwritten(place) for one that the call overwrites.
  //
  // These notify its observers:
  call.admitted();
  call.abandoned();
  call.failed();
  call.finished();
  call.about_to_shrink();  // returns an object that must live while other storages are evicted in the middle of the call
};

class Operators {
 public:
  Operators(Ledger& ledger, Recipes& recipes, Eviction& eviction, Rematerializer& rematerializer, Mutation& mutation)
      : ledger_(ledger), recipes_(recipes), eviction_(eviction), rematerializer_(rematerializer), mutation_(mutation) {}

  // -- before it runs --

  // Returns whether `admit` would have nothing to evict, bring back or copy.
  template <IsCall C>
  bool is_ready(C& call) const {
    for (const Version* one : call.versions)
      if (!one->resident) return false;
    if (!eviction_.has_room(call.signature->output_bytes)) return false;
    if (call.opaque) return false;
    bool recordable = call.replayable && !call.reshapes;  // if false, everything that is written to becomes a constant
    for (size_t place = 0; place < call.written.size(); place++) {
      const Version* one = call.written[place].target;
      recordable = recordable && !one->constant() && !call.is_leaf(place) && mutation_.is_recent(one);
    }
    for (const Call::Write& write : call.written)
      if (write.target->needed_by || write.target->host || (ledger_.pressure && write.target->used && !recordable)) return false;
    if (call.updates_statistics)
      for (size_t hole : call.statistics)
        if (call.versions[hole]->needed_by || call.versions[hole]->host || (ledger_.pressure && call.versions[hole]->used))
          return false;
    return true;
  }

  // Brings the inputs back, rescues what a mutation would lose, makes room and reserves it. If this raises, for instance the budget
  // error, call `abandon` to release what the call holds.
  template <IsCall C>
  void admit(C& call) {
    Backend& backend = ledger_.backend;
    if (ledger_.counting() && !ledger_.is_ample(call.signature->output_bytes)) recipes_.end_counting();
    call.recordable = call.replayable;
    for (const Version* one : call.versions)
      call.recordable = call.recordable && !one->away && (!one->escaped || backend.trusts(one));
    call.admitted();
    lock(call);
    if (call.opaque)
      for (Version* one : call.versions) mutation_.escape(one, pins::SHARED);
    bool recordable = call.recordable;
    do {  // rescues, and evictions to make room, may turn what will be written to into constants
      release_changing(call);
      call.recordable = recordable;
      if (!call.written.empty()) prepare_writes(call);
      if (call.updates_statistics) prepare_statistics(call);
      eviction_.make_room(call.signature->output_bytes, call.signature);
    } while (std::any_of(call.written.begin(), call.written.end(),
                         [](const Call::Write& write) { return write.constant != write.target->constant(); }));
    if (call.reserves) ledger_.reserve(call.id, backend.thread(), call.signature->output_bytes);
  }

  // Releases what a call holds if it does not run.
  template <IsCall C>
  void abandon(C& call) {
    bool reserved = unlock(call);
    call.abandoned();
    if (reserved) ledger_.backend.room_given_back();
  }

  // -- after it ran --

  // Enters what a call has made; its cost is known by now. outputs: `NewStorage`s. plain: all results have a plain storage. Raises
  // the budget error if its outputs exceed the budget.
  template <IsCall C, class Outputs>
  void finish(C& call, const Outputs& outputs, bool plain) {
    ledger_.age++;
    if (!call.view) ledger_.clock += call.cost;  // recreating a view is free: it comes back with its storage
    ledger_.collect_dead();
    bool reserved = unlock(call);
    if (call.updates_statistics)
      for (size_t hole : call.statistics)
        if (call.versions[hole]->used && is_present(call.versions[hole])) recipes_.supersede(call.versions[hole], nullptr, 0);
    // Meanwhile another thread may have written to it, or its storage may have died.
    for (const Call::Write& write : call.written) call.recordable = call.recordable && is_present(write.target);
    bool makes_nothing = call.view && !call.reshapes && call.written.empty();
    OperationRef operation = call.recordable && !makes_nothing ? record(call) : OperationRef();
    Made made;
    for (const Call::Write& write : call.written) enter_write(call, write, operation.get(), made);
    if (!plain && !call.view) {
      std::vector<VersionRef> shared;
      for (size_t hole = 0; hole < call.versions.size(); hole++)
        if (!is_statistics(call, hole)) shared.emplace_back(call.versions[hole]);
      mutation_.escape_together(shared, pins::SHARED);
    }
    if (!call.handed_out.empty()) mutation_.escape_together(call.handed_out, pins::HANDED_OUT);
    if (!call.view || call.reshapes) enter_outputs(call, operation.get(), outputs, made);
    if (operation) made.tell(*operation.get());
    call.finished();
    if (reserved) ledger_.backend.room_given_back();
    if (ledger_.resident_bytes > ledger_.limit && call.shrinks && made.any()) {  // it has allocated more than predicted
      [[maybe_unused]] auto meanwhile = call.about_to_shrink();
      std::vector<VersionRef> spared = made.all();
      Locked locked(spared);
      eviction_.make_room(0, call.signature);
    }
  }

  // Cleans up after a call that has raised: the program gets its error, and nothing stays locked.
  template <IsCall C>
  void fail(C& call) {
    bool reserved = unlock(call);
    for (const Call::Write& write : call.written) {
      if (write.target->away) continue;
      VersionRef version = recipes_.half_written(write.target);
      if (!version) continue;
      if (auto nbytes = call.resized(write.hole, version.get())) ledger_.backend.resized(version.get(), *nbytes);
    }
    if (call.updates_statistics)
      for (size_t hole : call.statistics) recipes_.half_written(call.versions[hole]);
    call.failed();
    if (reserved) ledger_.backend.room_given_back();
  }

  // Enters a storage that an operator has made which was only counted, as a constant.
  VersionRef adopt_counted(Storage* storage) {
    VersionRef version = new_version(storage);
    version->pin = pins::COUNTED;
    ledger_.enter(version.get());
    return version;
  }

  // Enters a storage that no recorded operator made, as a constant. pin: why it can't be evicted.
  VersionRef adopt(Storage* storage, Pin pin) {
    Backend& backend = ledger_.backend;
    if (pin == pins::CONSTANT && backend.is_counted(storage)) return adopt_counted(storage);
    Place place = backend.place_of(storage);  // first: the session may begin to use a device
    VersionRef version = new_version(storage);
    version->pin = pin;
    Ledger::Using now(ledger_, version.get());
    if (place == Place::OTHER_DEVICE) {  // neither counted nor recomputed from (a copy from the host is a constant)
      version->nbytes = 0;
      version->escaped = true;
      version->pin = pins::OTHER_DEVICE;
    } else if (place == Place::FOREIGN_MEMORY) {
      version->escaped = true;
      version->pin = pins::FOREIGN_MEMORY;
      for (const VersionRef& other : backend.overlapped(version.get(), storage))
        mutation_.escape(other.get(), pins::FOREIGN_MEMORY);
    } else if (pin == pins::CONSTANT && 0 < version->nbytes && version->nbytes <= SMALL_CONSTANT) {
      backend.keep_small(storage);
    }
    backend.met(storage);
    if (ledger_.resident_bytes + version->nbytes > ledger_.limit) {
      try {  // the memory exists already, so evict something else to compensate
        eviction_.make_room(version->nbytes, nullptr, "a tensor from outside");
      } catch (...) {
        if (!backend.is_budget_error()) throw;
        eviction_.over_budget++;
      }
    }
    ledger_.enter(version.get());
    return version;
  }

 private:
  // The versions that a call has made or written to.
  class Made {
   public:
    // where: its place in the recipe that makes it, or nullopt.
    void add(VersionRef version, std::optional<int64_t> where) {
      if (count_ < first_.size())
        first_[count_] = {std::move(version), where};
      else
        more_.push_back({std::move(version), where});
      count_++;
    }
    bool any() const { return count_ != 0; }
    // Tells the recipe what it makes. If that is anything, what the recipe reads counts as used.
    void tell(Recorded& operation) const {
      size_t count = 0;
      each([&](const One& one) { count += one.where.has_value(); });
      if (count != 0)
        for (Node* read : operation) as_version(read)->used = true;
      if (count == 1) return each([&](const One& one) { operation.where = one.where.value_or(operation.where); });
      std::vector<Output> outputs;
      each([&](const One& one) {
        if (one.where) outputs.push_back({*one.where, WeakVersion(one.version.get())});
      });
      set_outputs(operation, std::move(outputs));
    }
    std::vector<VersionRef> all() const {
      std::vector<VersionRef> found;
      each([&](const One& one) { found.emplace_back(one.version.get()); });
      return found;
    }

   private:
    struct One {
      VersionRef version;
      std::optional<int64_t> where;
    };
    template <class Function>
    void each(const Function& function) const {
      for (size_t i = 0; i < count_; i++) function(i < first_.size() ? first_[i] : more_[i - first_.size()]);
    }
    std::array<One, 2> first_;  // few operators make more than two
    std::vector<One> more_;
    size_t count_ = 0;
  };

  template <IsCall C>
  static bool is_statistics(const C& call, size_t hole) {
    return std::find(call.statistics.begin(), call.statistics.end(), hole) != call.statistics.end();
  }

  // Locks a call's versions and brings back the evicted ones.
  template <IsCall C>
  void lock(C& call) {
    bool resident = true;
    for (Version* one : call.versions) {
      one->locks++;
      if (call.untouching) continue;
      one->last_access = ledger_.clock;
      resident = resident && one->resident;
    }
    call.locked = true;
    if (resident) return;
    Rematerializer::Targets targets;
    for (Version* one : call.versions) targets.emplace_back(one);
    rematerializer_.materialize(targets, true);
  }

  // Returns whether a version is the present one of its storage.
  bool is_present(const Version* version) const { return ledger_.versions.find(version->key) == version; }

  // Decides whether an operator that writes gets a recipe, which must cover everything it writes to. If not, rescues what depends
  // on the content of its targets.
  template <IsCall C>
  void prepare_writes(C& call) {
    bool recordable = call.recordable && !call.reshapes;
    for (size_t place = 0; place < call.written.size(); place++) {
      auto overwrites = [&] { return recordable && call.overwrites(place); };
      recordable = mutation_.may_record(call.written[place].target, call.is_leaf(place), overwrites) && recordable;
    }
    call.recordable = recordable;
    for (Call::Write& write : call.written) {
      if (!recordable) {
        recipes_.make_constant(write.target, pins::UPDATED_IN_PLACE);
        Mutation::no_longer_blank(write.target);
      }
      write.constant = write.target->constant();
    }
    auto each = [&](const auto& function) {
      for (const Call::Write& write : call.written)
        if (write.constant && !write.target->away) function(write.target);
    };
    mutation_.about_to_change(each, call.changing);
  }

  // Does the same for running statistics, which a replay leaves alone.
  template <IsCall C>
  void prepare_statistics(C& call) {
    for (size_t hole : call.statistics) recipes_.make_constant(call.versions[hole], pins::RUNNING_STATISTICS);
    auto each = [&](const auto& function) {
      for (size_t hole : call.statistics) function(call.versions[hole]);
    };
    mutation_.about_to_change(each, call.changing);
  }

  template <IsCall C>
  static void release_changing(C& call) {
    for (auto& one : call.changing) one->escaped = false;
    call.changing.clear();
  }
  // Releases what a call holds. Returns whether room was reserved for it: threads that wait for room are notified last, by Python
  // code, which an interrupt may end.
  template <IsCall C>
  bool unlock(C& call) {
    bool reserved = call.reserves && ledger_.give_back(call.id);
    release_changing(call);
    if (call.locked) {
      call.locked = false;
      for (Version* one : call.versions) one->locks--;
      ledger_.unlocks++;
    }
    return reserved;
  }

  template <IsCall C>
  OperationRef record(C& call) {
    constexpr size_t FEW = 8;
    std::unordered_map<const Version*, size_t> places;  // in `written`; used when a `_foreach_` operator writes to thousands
    if (call.written.size() > FEW)
      for (size_t place = 0; place < call.written.size(); place++) places.emplace(call.written[place].target, place);
    auto place_of = [&](const Version* version) -> std::optional<size_t> {
      if (places.empty()) {
        for (size_t place = 0; place < call.written.size(); place++)
          if (call.written[place].target == version) return place;
        return std::nullopt;
      }
      auto found = places.find(version);
      return found == places.end() ? std::nullopt : std::optional(found->second);
    };
    return call.record([&](const auto& read, const auto& overwritten) {
      for (size_t hole = 0; hole < call.versions.size(); hole++) {
        if (is_statistics(call, hole)) continue;
        auto place = place_of(call.versions[hole]);
        if (place && call.overwrites(*place))
          overwritten(*place);
        else
          read(call.versions[hole]);
      }
    });
  }

  // Enters the new version of a storage that was written to.
  template <IsCall C>
  void enter_write(C& call, const Call::Write& write, Recorded* operation, Made& made) {
    Version* target = write.target;
    if (!target->superseded && !is_present(target)) return;  // its storage died with the operator's arguments
    VersionRef version(ledger_.versions.find(target->key));
    if (!version) return;
    std::optional<int64_t> where;
    if (operation != nullptr) {
      version = recipes_.supersede(version.get(), operation, call.cost);
      auto left_out = std::count_if(call.statistics.begin(), call.statistics.end(), [&](size_t one) { return one < write.hole; });
      where = ~(static_cast<int64_t>(write.hole) - left_out);  // in the recipe, which leaves out running statistics
    } else if (version->used && !version->away) {
      version = recipes_.supersede(version.get(), nullptr, 0);
    }
    if (auto nbytes = call.resized(write.hole, version.get())) ledger_.backend.resized(version.get(), *nbytes);
    // The memory is in use by another thread's operator, which has locked the old version.
    if (target->locks != 0) mutation_.escape(version.get(), pins::SHARED_BY_THREADS);
    made.add(std::move(version), where);
  }

  template <IsCall C, class Outputs>
  void enter_outputs(C& call, Recorded* operation, const Outputs& outputs, Made& made) {
    int64_t total = 0;
    for (const NewStorage& output : outputs) {
      VersionRef version;
      std::optional<int64_t> where;
      bool elsewhere = output.kind == NewStorage::ELSEWHERE || output.kind == NewStorage::FOREIGN;
      if (operation != nullptr && output.kind == NewStorage::NEW) {
        version = enter(output.storage, operation);
        where = output.where;
      } else if (call.uninitialised && output.kind == NewStorage::NEW) {
        version = new_version(output.storage);
        version->pin = pins::UNINITIALISED;
        ledger_.enter(version.get());
      } else if (operation != nullptr && elsewhere) {
        version = adopt(output.storage, pins::CONSTANT);
      } else {
        version = adopt(output.storage, output.kind == NewStorage::READ_NATIVELY ? pins::READ_UNSEEN : why_not_recorded(call));
        version->escaped = version->escaped || output.kind == NewStorage::UNTRACKED;
      }
      total += version->nbytes;
      made.add(std::move(version), where);
    }
    call.made(total);
  }

  // Returns why the results of a call without a recipe stay in memory.
  template <IsCall C>
  Pin why_not_recorded(const C& call) const {
    auto exposed = [&](const Version* one) { return one->escaped && !ledger_.backend.trusts(one); };
    bool reads_exposed = call.opaque || std::any_of(call.versions.begin(), call.versions.end(), exposed);
    return reads_exposed ? pins::INPUT_EXPOSED : pins::NOT_REPLAYABLE;
  }

  // Enters a new storage that an operation has made.
  VersionRef enter(Storage* storage, Recorded* operation) {
    VersionRef version = new_version(storage);
    set_operation(version.get(), operation);
    version->cost = operation->signature->cost;
    ledger_.enter(version.get());
    ledger_.evictable(version.get());
    return version;
  }

  VersionRef new_version(Storage* storage) {
    VersionRef version = ledger_.backend.version_over(storage);
    version->of_backward = ledger_.in_backward;
    ledger_.settle();  // it may have been counted
    version->nbytes = ledger_.backend.size_of(storage);
    version->age = ledger_.age;
    version->last_access = ledger_.clock;
    return version;
  }

  Ledger& ledger_;
  Recipes& recipes_;
  Eviction& eviction_;
  Rematerializer& rematerializer_;
  Mutation& mutation_;
};

}  // namespace dtrrun
