// What the core asks of the world: PyTorch and a session, or a log and a simulation.
#pragma once

#include <exception>

#include "version.h"

namespace dtrrun {

// What is done with one of an operation's tensors when it runs again. COPY: it is written to, and others need what it holds now.
// TAKE: nobody does. AGAIN: it is one that has been copied or taken. BLANK: it gets new memory, since all of it is overwritten.
enum class Use : uint8_t { READ, COPY, TAKE, AGAIN, BLANK };

// An operation that runs again.
struct Run {
  Version* wanted;
  Recorded* maker;
  std::vector<Use> uses;          // of its tensors
  std::vector<StorageRef> held;   // the memory of what it reads
  std::vector<StorageRef> made;   // receives, for each of its outputs, the storage that has been made or written
  int64_t cost = 0;               // receives the time that it took, ns
};

// What observers are told before it is done to a version (`core/observer.py`).
enum class Change { ESCAPES, WRITTEN_OUTSIDE, PINNED };

// Where the memory of a storage is.
enum class Place { OURS, OTHER_DEVICE, FOREIGN_MEMORY };

class Backend : public Program {
 public:
  // -- storages --

  // That of the program's which a version has; none if it is gone.
  virtual StorageRef storage_of(const Version* version) const = 0;
  // A version of this storage, resident and without a recipe.
  virtual VersionRef version_over(Storage* storage) = 0;
  // The bytes that a storage takes, as a version counts them.
  virtual int64_t size_of(Storage* storage) const = 0;
  virtual Place place_of(Storage* storage) = 0;
  // A small constant has been met: it is kept for a while.
  virtual void keep_small(Storage* storage) = 0;
  // A version is about to count this storage.
  virtual void met(Storage* storage) = 0;
  // A version of foreign memory is new. Returns the versions of others that it overlaps.
  virtual std::vector<VersionRef> overlapped(Version* version, Storage* storage) = 0;
  // A storage that is in memory has another size.
  virtual void resized(Version* version, int64_t nbytes) = 0;
  // A version of the storage that another one has, resident and without a recipe.
  virtual VersionRef successor(Version* version) = 0;
  // Gives the memory back to the allocator; the storage keeps its identity.
  virtual void empty(Storage* storage) = 0;
  // Hands the memory of `source` to an emptied storage.
  virtual void refill(Storage* emptied, Storage* source) = 0;
  // Whether a storage takes this much, as a version counts it.
  virtual bool holds(Storage* storage, int64_t nbytes) const = 0;
  // Raises the internal error that an operation has made something else than before.
  [[noreturn]] virtual void made_otherwise(const Run& run, Storage* storage, int64_t nbytes) = 0;

  // -- operations --

  // Calls `function` where operators are hidden from the program, and their warnings are not shown.
  virtual void beneath(void (*function)(void*), void* argument) = 0;
  // Runs an operation whose inputs are locked and whose outputs there is room for. Fills in `made` and `cost`.
  virtual void execute(Run& run) = 0;
  // An operation has been run again.
  virtual void ran(const Run& run) = 0;
  // A new storage with the same content; none if the system has no memory for it.
  virtual StorageRef copy(Storage* storage) = 0;
  // A number of the present thread.
  virtual uint64_t thread() const = 0;
  // Called between operations that are run again.
  virtual void between() = 0;

  // -- memory of others --

  // Whether an escaped version is known to be a constant nonetheless.
  virtual bool trusts(const Version* version) const = 0;
  // An operator is about to write to an escaped version.
  virtual void escaped_changes(Version* version) = 0;
  // It is handed out or shared, so nothing is recomputed from it from now on.
  virtual void give_up(Version* version) = 0;
  // Whether what was computed from an escaped constant may be evicted.
  virtual bool may_be_read(Version* version) = 0;
  // Raises an error unless an escaped constant is as it was when its dependents were computed.
  virtual void check_unchanged(Version* version) = 0;
  // Sets the limit again: some of what is no tensor's may have been freed.
  virtual void look_outside() = 0;
  // Called occasionally, as memory is given back to the C library.
  virtual void check_heap() = 0;
  virtual bool has_heap() const = 0;

  // -- where there is no room --

  // So many bytes, what is reserved among them, do not fit. Returns if the budget is to be exceeded, and raises the budget
  // error if not. of: the signature of the operator that needs them, or null; name: then who does.
  virtual void no_room(int64_t nbytes, const Signature* of, const char* name) = 0;
  // Whether the exception that is being handled is the budget error.
  virtual bool is_budget_error() const = 0;
  // Whether it says that something is lost for good, since other code has overwritten what it was computed from.
  virtual bool is_loss() const = 0;
  // That exception, without what it keeps alive.
  virtual std::exception_ptr budget_error() = 0;
  // Collects garbage because so much has been recomputed.
  virtual void collection_due() = 0;
  // Nothing is left to evict. Returns whether a garbage collection has freed memory.
  virtual bool collect_garbage() = 0;
  // Brings back what did not fit, in as little memory as possible (`core/frugal.py`). Returns whether that was possible.
  virtual bool frugally(const std::vector<VersionRef>& targets, bool locked) = 0;
  // Whether a rematerialization that finds no room shall not be tried again in the same way.
  virtual bool ends_at_once(const std::vector<VersionRef>& targets) = 0;
  // Garbage is collected, perhaps, before so much is brought back, to stay. Returns whether it was.
  virtual bool collect_before_rescue(int64_t nbytes) = 0;
  // Raises an error: an evicted version has no recipe.
  [[noreturn]] virtual void refuse(Version* version) = 0;

  // -- observers --

  // An operator's reservation and locks are released.
  virtual void room_given_back() {}
  virtual void changes(Change, Version*, Pin /*why*/, bool /*escapes*/) {}
  virtual void take_fingerprint(Version*) {}
  virtual void compare_fingerprint(Version*) {}
  // The storage of a version is gone.
  virtual void died(Version*) {}
  // When something begins that observers of decisions will be told of: ns, or 0 if there are none.
  virtual int64_t begins() const { return 0; }
  // victim: null if none was found. began: as returned by `begins`.
  virtual void searched(Version* /*victim*/, int64_t /*began*/) {}
  virtual void evicted(Version*, int64_t /*began*/) {}
  virtual void rematerialized(const Run&, int64_t /*began*/) {}
  // Counts an eviction by the operator.
  virtual void tally_eviction(const Recorded*) {}
  // A version takes over the storage of another one.
  virtual void superseded(Version* /*old*/, Version* /*made*/) {}
};

}  // namespace dtrrun
