// What the core needs from outside: from PyTorch and a session, or from a log and a simulation.
#pragma once

#include <exception>

#include "version.h"

namespace dtrrun {

// What is done with one of an operation's tensors when it runs again. COPY: it is written to, and its present content is still
// needed elsewhere. TAKE: it is written to, and its content is not. AGAIN: it shares the memory of an earlier tensor that was
// copied or taken, or is blank. BLANK: it gets new memory, since all of it is overwritten.
enum class Use : uint8_t { READ, COPY, TAKE, AGAIN, BLANK };

// One replay of an operation.
struct Run {
  Version* wanted;
  Recorded* maker;
  std::vector<Use> uses;          // one for each of its tensors
  std::vector<StorageRef> held;   // the storages of what it reads
  std::vector<StorageRef> made;   // out: for each output, the storage that was made or written to
  int64_t cost = 0;               // out: the time it took, ns
};

// Changes to a version that observers are notified of beforehand (`core/observer.py`).
enum class Change { ESCAPES, WRITTEN_OUTSIDE, PINNED };

// Where the memory of a storage is.
enum class Place { OURS, OTHER_DEVICE, FOREIGN_MEMORY };

class Backend : public Program {
 public:
  // -- storages --

  // Returns the program's storage of a version; empty if it is gone.
  virtual StorageRef storage_of(const Version* version) const = 0;
  // Makes a version of this storage, resident and without a recipe.
  virtual VersionRef version_over(Storage* storage) = 0;
  // Returns the bytes that a storage takes, as a version counts them.
  virtual int64_t size_of(Storage* storage) const = 0;
  virtual Place place_of(Storage* storage) = 0;
  // Returns whether a storage has no version because its operator was only counted (`Census`).
  virtual bool is_counted(Storage* /*storage*/) const { return false; }
  // Keeps a small constant alive for a while.
  virtual void keep_small(Storage* storage) = 0;
  // Called when a version is about to count this storage.
  virtual void met(Storage* storage) = 0;
  // Called with a new version of foreign memory. Returns the versions whose memory it overlaps.
  virtual std::vector<VersionRef> overlapped(Version* version, Storage* storage) = 0;
  // Called when a storage that is in memory has changed its size.
  virtual void resized(Version* version, int64_t nbytes) = 0;
  // Makes a version that takes over another one's storage, resident and without a recipe.
  virtual VersionRef successor(Version* version) = 0;
  // Gives the memory back to the allocator; the storage keeps its identity.
  virtual void empty(Storage* storage) = 0;
  // Moves the memory of `source` to an emptied storage.
  virtual void refill(Storage* emptied, Storage* source) = 0;
  // Copies a version back from the host to its storage, which has been emptied. There is room for it.
  virtual void bring(HostCopy& copy, Storage* emptied, int64_t clock) { copy.tier->bring(copy, emptied, clock); }
  // Returns whether a storage takes this many bytes, as a version counts them.
  virtual bool holds(Storage* storage, int64_t nbytes) const = 0;
  // Raises the internal error that a replay has made something other than the original run did.
  [[noreturn]] virtual void made_otherwise(const Run& run, Storage* storage, int64_t nbytes) = 0;

  // -- operations --

  // Calls `function` such that its operators are hidden from the program and their warnings are suppressed.
  virtual void beneath(void (*function)(void*), void* argument) = 0;
  // Runs an operation whose inputs are locked and for whose outputs there is room. Fills in `made` and `cost`.
  virtual void execute(Run& run) = 0;
  // Called when an operation has been run again.
  virtual void ran(const Run& run) = 0;
  // Returns a new storage with the same content; empty if the system has no memory for it.
  virtual StorageRef copy(Storage* storage) = 0;
  // Returns a number that identifies the current thread.
  virtual uint64_t thread() const = 0;
  // Called between operations that are run again.
  virtual void between() = 0;

  // -- memory that other code can reach --

  // Returns whether an escaped version is known to be a constant nonetheless.
  virtual bool trusts(const Version* version) const = 0;
  // Called when an escaped version is about to be written to.
  virtual void escaped_changes(Version* version) = 0;
  // Called when a version is handed out or shared: from now on nothing is recomputed from it.
  virtual void give_up(Version* version) = 0;
  // Returns whether what was computed from an escaped constant may be evicted.
  virtual bool may_be_read(Version* version) = 0;
  // Raises an error unless a constant that has escaped, or is away, is as it was when its dependents were computed.
  virtual void check_unchanged(Version* version) = 0;
  // Updates the limit: some memory that does not belong to tensors may have been freed.
  virtual void look_outside() = 0;
  // Called occasionally, as memory is given back to the C library.
  virtual void check_heap() = 0;
  virtual bool has_heap() const = 0;

  // -- when there is no room --

  // Called when this many bytes, including what is reserved, do not fit. Returns if the budget may be exceeded; otherwise raises
  // the budget error. of: the signature of the operator that needs them, or null. name: what needs them if `of` is null.
  virtual void no_room(int64_t nbytes, const Signature* of, const char* name) = 0;
  // Called when what is evicted can't be brought back within the limit. Returns whether the limit has been raised instead of an error.
  virtual bool exceeds() { return false; }
  // Returns whether the exception being handled is the budget error.
  virtual bool is_budget_error() const = 0;
  // Returns whether it says that something is lost for good, since other code has overwritten what it was computed from.
  virtual bool is_loss() const = 0;
  // Returns the exception being handled, without the objects that it keeps alive.
  virtual std::exception_ptr budget_error() = 0;
  // Collects garbage because so much has been recomputed.
  virtual void collection_due() = 0;
  // Called when nothing is left to evict. Returns whether a garbage collection has freed memory.
  virtual bool collect_garbage() = 0;
  // Called before this many bytes are brought back for good. May collect garbage first; returns whether it did.
  virtual bool collect_before_rescue(int64_t nbytes) = 0;
  // Raises the error for an evicted version that has no recipe.
  [[noreturn]] virtual void refuse(Version* version) = 0;

  // -- observers --

  // Called when operators are recorded again that were only counted: waits for those that run.
  virtual void counting_ended() {}
  // Called around evictions: meanwhile, no other thread may use what it has not locked (census.h).
  virtual void begin_evicting() {}
  virtual void end_evicting() {}
  // Called when the first constant is about to leave for the host.
  virtual void constants_leave() {}
  // Enters what was only counted (census.h), as far as it can be found.
  virtual void adopt_counted() {}
  // Called when an operator's reservation and locks have been released.
  virtual void room_given_back() {}
  virtual void changes(Change, Version*, Pin /*why*/, bool /*escapes*/) {}
  virtual void take_fingerprint(Version*) {}
  virtual void compare_fingerprint(Version*) {}
  // Called when the storage of a version is gone.
  virtual void died(Version*) {}
  // Returns the present time in ns, for an event that observers of decisions will be notified of; 0 if there are none.
  virtual int64_t begins() const { return 0; }
  // victim: null if none was found. began: from `begins`.
  virtual void searched(Version* /*victim*/, int64_t /*began*/) {}
  virtual void evicted(Version*, int64_t /*began*/) {}
  virtual void rematerialized(const Run&, int64_t /*began*/) {}
  // Called when a version has left for the host, and when it has come back.
  virtual void left(Version*, int64_t /*began*/) {}
  virtual void returned(Version*, int64_t /*began*/) {}
  // Counts an eviction under the name of the operator that made the version.
  virtual void tally_eviction(const Recorded*) {}
  // Called when one version takes over the storage of another.
  virtual void superseded(Version* /*old*/, Version* /*made*/) {}
};

}  // namespace dtrrun
