// One operator of the program, from before it runs until its outputs are in the ledger (Sec. 2, figure 1).
//
// Its inputs are made resident and locked, room is made for what it will allocate, and it runs. Then its outputs are entered with
// its recipe, and the inputs are unlocked. The slow path does this with tensors, the simulator with the contents of a log. The
// fast path (`native/fast_call.h`) does the same for plain operators.
#pragma once

#include "mutation.h"

namespace dtrrun {

constexpr int64_t SMALL_CONSTANT = 512;  // bytes

// A storage that an operator has made, and that was not in the ledger before. NEW: it can be evicted if the operator has a recipe.
// ODD: not a plain tensor over a storage: neither evicted nor recomputed from. UNSEEN: code that is not an operator reads it: it
// stays in memory. ELSEWHERE: on another device. FOREIGN: its memory is not from our allocator.
struct NewStorage {
  enum Kind { NEW, ODD, UNSEEN, ELSEWHERE, FOREIGN };
  int64_t where;  // the index of its tensor among the results
  StorageRef storage;
  Kind kind;
};

// One operator call in progress (`core.operator.Call`). A hole is a tensor's index among the tensor arguments.
class Call {
 public:
  virtual ~Call() = default;

  struct Write {
    Version* target;
    std::vector<size_t> holes;  // through which it is written to
  };

  int64_t id = 0;  // by which it is known until it is over
  Signature* signature = nullptr;
  std::vector<Version*> versions;  // of its tensor arguments, by hole: kept
  std::vector<Write> written;
  std::vector<size_t> statistics;  // holes of running statistics, which a replay neither reads nor updates
  std::vector<VersionRef> handed_out;  // versions that other code can reach once it has run
  int64_t cost = 0;  // ns, once it has run
  bool replayable = true;   // the operator and its arguments allow a replay
  bool recordable = true;   // it gets a recipe; known once it is admitted
  bool view = false;        // its results are views: nothing is entered, and recreating them is free
  bool untouching = false;  // it does not read its inputs' memory
  bool reshapes = false;    // it may change which memory a storage has
  bool opaque = false;      // an input has no plain storage
  bool uninitialised = false;       // its results are
  bool shrinks = false;             // it may have allocated more than predicted
  bool updates_statistics = false;  // this call does

  // place: among those written.
  virtual bool is_leaf(size_t place) = 0;     // a leaf of autograd, written through that leaf
  virtual bool overwrites(size_t place) = 0;  // all of it, without reading it
  // The bytes that a version takes after being written to; none if unchanged.
  virtual std::optional<int64_t> resized(size_t hole, Version* version) = 0;
  // So many bytes of its results are new.
  virtual void made(int64_t nbytes) = 0;
  // Its recipe. entries: for each of its tensors that a replay needs, the version, or null and the place of what it overwrites.
  struct Entry {
    Version* version;
    size_t place;
  };
  virtual OperationRef record(const std::vector<Entry>& entries) = 0;

  bool is_statistics(size_t hole) const { return std::find(statistics.begin(), statistics.end(), hole) != statistics.end(); }
};

class Operators {
 public:
  Operators(Ledger& ledger, Recipes& recipes, Eviction& eviction, Rematerializer& rematerializer, Mutation& mutation)
      : ledger_(ledger), recipes_(recipes), eviction_(eviction), rematerializer_(rematerializer), mutation_(mutation) {}

  // -- before it runs --

  // Brings the inputs back, rescues what a mutation would lose, makes room and reserves it. If this raises, for instance the budget
  // error, `abandon` releases what the call has taken.
  void admit(Call& call) {
    Backend& backend = ledger_.backend;
    call.recordable = call.replayable && std::all_of(call.versions.begin(), call.versions.end(), [&](const Version* one) {
                        return !one->escaped || backend.trusts(one);
                      });
    backend.admitted(call);
    Taken& taken = taken_[call.id];
    if (call.untouching) {
      for (Version* one : call.versions) {
        one->locks++;
        taken.locked.emplace_back(one);
      }
    } else {
      rematerializer_.lock(call.versions, taken.locked);
    }
    if (call.opaque)
      for (Version* one : call.versions) mutation_.escape(one, pins::SHARED);
    if (!call.written.empty()) prepare_writes(call, taken.changing);
    if (call.updates_statistics) {
      std::vector<Version*> statistics;
      for (size_t hole : call.statistics) statistics.push_back(call.versions[hole]);
      for (Version* one : statistics) recipes_.make_constant(one, pins::RUNNING_STATISTICS);
      mutation_.about_to_change(statistics, taken.changing);
    }
    eviction_.make_room(call.signature->output_bytes, call.signature);
    ledger_.reserve(call.id, backend.thread(), call.signature->output_bytes);
  }

  // Releases what a call has taken, when it does not run.
  void abandon(Call& call) {
    unlock(call);
    ledger_.backend.abandoned(call);
  }

  // -- after it ran --

  // Enters what a call has made; its cost is known. plain: all results have a plain storage. Raises the budget error if its outputs
  // exceed the budget.
  void finish(Call& call, const std::vector<NewStorage>& outputs, bool plain) {
    ledger_.age++;
    if (!call.view) ledger_.clock += call.cost;  // a view comes back with its storage
    ledger_.collect_dead();
    unlock(call);
    if (call.updates_statistics)
      for (size_t hole : call.statistics)
        if (call.versions[hole]->used) recipes_.supersede(call.versions[hole], nullptr, 0);
    // Meanwhile, by another thread.
    for (const Call::Write& write : call.written) call.recordable = call.recordable && !write.target->superseded;
    OperationRef operation = call.recordable ? record(call) : OperationRef();
    std::vector<Output> made;
    std::vector<VersionRef> changed;
    for (const Call::Write& write : call.written) changed.push_back(enter_write(call, write, operation.get(), made));
    if (!plain && !call.view) {
      std::vector<VersionRef> shared;
      for (size_t hole = 0; hole < call.versions.size(); hole++)
        if (!call.is_statistics(hole)) shared.emplace_back(call.versions[hole]);
      mutation_.escape_together(shared, pins::SHARED);
    }
    if (!call.handed_out.empty()) mutation_.escape_together(call.handed_out, pins::HANDED_OUT);
    if (!call.view || call.reshapes) enter_outputs(call, operation.get(), outputs, made, changed);
    if (operation) set_outputs(*operation.get(), std::move(made));
    ledger_.backend.finished(call);
    if (ledger_.resident_bytes > ledger_.limit && call.shrinks) {
      Locked spared(changed);  // an operator allocated more than predicted
      eviction_.make_room(0, call.signature);
    }
  }

  // A call has raised: the program gets its error, and nothing stays locked.
  void fail(Call& call) {
    unlock(call);
    for (const Call::Write& write : call.written) {
      VersionRef version = recipes_.half_written(write.target);
      if (!version) continue;
      if (auto nbytes = call.resized(write.holes[0], version.get())) ledger_.backend.resized(version.get(), *nbytes);
    }
    if (call.updates_statistics)
      for (size_t hole : call.statistics) recipes_.half_written(call.versions[hole]);
    ledger_.backend.failed(call);
  }

  // Enters the outputs of a call that the caller has admitted and counted itself; see `finish`.
  void enter_results(Call& call, const std::vector<NewStorage>& outputs, bool plain) {
    OperationRef operation = record(call);
    if (!plain)
      for (Version* one : call.versions) mutation_.escape(one, pins::SHARED);
    std::vector<Output> made;
    std::vector<VersionRef> changed;
    enter_outputs(call, operation.get(), outputs, made, changed);
    set_outputs(*operation.get(), std::move(made));
  }

  // The version of a new storage that an operation has made.
  VersionRef enter(Storage* storage, Recorded* operation) {
    VersionRef version = new_version(storage);
    set_operation(version.get(), operation);
    version->cost = operation->signature->cost;
    ledger_.enter(version.get());
    ledger_.evictable(version.get());
    return version;
  }

  // Enters a storage that no recorded operator made, as a constant. pin: why it can't be evicted.
  VersionRef adopt(Storage* storage, Pin pin) {
    Backend& backend = ledger_.backend;
    VersionRef version = new_version(storage);
    version->pin = pin;
    Place place = backend.place_of(storage);
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
      try {  // the memory exists already, so evict something else for it
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
  // Constants that a call is about to write to: until it has, nothing may come to depend on them.
  struct Taken {
    std::vector<VersionRef> locked, changing;
  };

  // Decides whether an operator that writes gets a recipe, for all that it writes to; if not, what depends on their content is
  // rescued.
  void prepare_writes(Call& call, std::vector<VersionRef>& changing) {
    bool recordable = call.recordable && !call.reshapes;
    for (size_t place = 0; place < call.written.size(); place++) {
      auto overwrites = [&] { return recordable && call.overwrites(place); };
      recordable = mutation_.may_record(call.written[place].target, call.is_leaf(place), overwrites) && recordable;
    }
    std::vector<Version*> constants;
    if (!recordable) {
      for (const Call::Write& write : call.written) {
        recipes_.make_constant(write.target, pins::UPDATED_IN_PLACE);
        Mutation::no_longer_blank(write.target);
      }
    }
    for (const Call::Write& write : call.written)
      if (write.target->constant()) constants.push_back(write.target);
    call.recordable = recordable;
    mutation_.about_to_change(constants, changing);
  }

  // Releases what a call has taken.
  void unlock(Call& call) {
    if (ledger_.give_back(call.id)) ledger_.backend.room_given_back();
    auto place = taken_.find(call.id);
    if (place == taken_.end()) return;
    Taken taken = std::move(place->second);
    taken_.erase(place);
    for (const VersionRef& one : taken.changing) one->escaped = false;
    Rematerializer::unlock(taken.locked);
  }

  OperationRef record(Call& call) {
    std::vector<Call::Entry> entries;
    std::unordered_map<const Version*, size_t> places;  // of what is written: a `_foreach_` operator has thousands
    for (size_t place = 0; place < call.written.size(); place++) places.emplace(call.written[place].target, place);
    for (size_t hole = 0; hole < call.versions.size(); hole++) {
      if (call.is_statistics(hole)) continue;
      Version* version = call.versions[hole];
      auto place = places.find(version);
      if (place != places.end() && call.overwrites(place->second)) {
        entries.push_back({nullptr, place->second});
      } else {
        version->used = true;
        entries.push_back({version, 0});
      }
    }
    return call.record(entries);
  }

  // Returns the version that what was written to has now.
  VersionRef enter_write(Call& call, const Call::Write& write, Recorded* operation, std::vector<Output>& made) {
    Version* target = write.target;
    VersionRef version(target->superseded ? ledger_.versions.find(target->key) : target);
    size_t hole = write.holes[0];
    if (operation != nullptr) {
      version = recipes_.supersede(version.get(), operation, call.cost);
      auto left_out = std::count_if(call.statistics.begin(), call.statistics.end(), [&](size_t one) { return one < hole; });
      made.push_back({~(static_cast<int64_t>(hole) - left_out), WeakVersion(version.get())});  // its place in the recipe
    } else if (version->used) {
      version = recipes_.supersede(version.get(), nullptr, 0);
    }
    if (auto nbytes = call.resized(hole, version.get())) ledger_.backend.resized(version.get(), *nbytes);
    // Another thread's operator, which has locked the old version, uses the memory.
    if (target->locks != 0) mutation_.escape(version.get(), pins::SHARED_BY_THREADS);
    return version;
  }

  void enter_outputs(Call& call, Recorded* operation, const std::vector<NewStorage>& outputs, std::vector<Output>& made,
                     std::vector<VersionRef>& changed) {
    int64_t total = 0;
    for (const NewStorage& output : outputs) {
      VersionRef version;
      bool elsewhere = output.kind == NewStorage::ELSEWHERE || output.kind == NewStorage::FOREIGN;
      if (operation != nullptr && output.kind == NewStorage::NEW) {
        version = enter(output.storage.get(), operation);
        made.push_back({output.where, WeakVersion(version.get())});
      } else if (operation != nullptr && elsewhere) {
        version = adopt(output.storage.get(), pins::CONSTANT);
      } else {
        Pin pin = output.kind == NewStorage::UNSEEN ? pins::READ_UNSEEN : pins::NOT_REPLAYABLE;
        version = adopt(output.storage.get(), call.uninitialised ? pins::UNINITIALISED : pin);
        version->escaped = version->escaped || output.kind == NewStorage::ODD;
      }
      total += version->nbytes;
      changed.push_back(std::move(version));
    }
    call.made(total);
  }

  VersionRef new_version(Storage* storage) {
    VersionRef version = ledger_.backend.version_over(storage);
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
  std::unordered_map<int64_t, Taken> taken_;  // by call
};

}  // namespace dtrrun
