// The graph of storage versions and the operations that made them (App. C.1), including what the policy does not need to know.
//
// Mutation follows the paper's reference layer (App. C.6): an in-place operator makes a new version, which takes over the
// storage. The old version remains, without memory, while a recipe needs it. References run from dependents to inputs only,
// so a version that nothing needs is freed at once.
#pragma once

#include <algorithm>
#include <atomic>
#include <memory>
#include <vector>

#include "host.h"
#include "pin.h"
#include "policy/node_memory.h"

namespace dtrrun {

struct Version;

// Returns the number of a new search through the graph, by which it marks what it has seen. Searches may not be interleaved.
inline int64_t next_search() {
  static std::atomic<int64_t> last{0};
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}
// Returns whether a search comes to a version or an operation for the first time.
template <class One>
bool newly_seen(One* one, int64_t search) {
  return std::exchange(one->seen, search) != search;
}

// A weak reference to a version: null once the version has gone.
class WeakVersion {
 public:
  struct Cell : InNodeMemory {
    Version* version;
    int64_t references = 1;
    explicit Cell(Version* one) : version(one) {}
  };
  explicit WeakVersion(Version* version);
  WeakVersion(const WeakVersion& other) : WeakVersion(other.cell_) {}
  WeakVersion(WeakVersion&& other) noexcept : cell_(std::exchange(other.cell_, nullptr)) {}
  WeakVersion& operator=(WeakVersion other) noexcept {
    std::swap(cell_, other.cell_);
    return *this;
  }
  ~WeakVersion() {
    if (cell_ != nullptr) let_go(cell_);
  }
  Version* get() const { return cell_->version; }

 private:
  friend struct Version;
  explicit WeakVersion(Cell* cell) : cell_(cell) { cell->references++; }
  static void let_go(Cell* cell) {
    if (--cell->references == 0) delete cell;
  }
  Cell* cell_;
};

struct Dependents : InNodeMemory, ShortVector<WeakVersion> {};

// Members not described here are described in `core.graph.Version`.
struct Version : Node {
  int64_t key = 0;        // key of its storage in the ledger's table
  int64_t mutations = 0;  // number of mutations since the storage was made
  int64_t extent = -1;    // bytes of the storage that its first tensor reaches, -1 for all (only set under --verify)
  int64_t locks = 0;      // above 0 while an operator needs it
  int64_t readers = 0;    // how often recipes read it
  int64_t scratch_place = 0;  // place in the ledger's list of scratch versions; 0: not in it
  int64_t constant_place = 0;  // the same for the list of constants that may leave for the host
  int64_t seen = 0;  // number of the last search that has come to it
  int64_t period = 0;  // of the clock, between the two uses around its last stay on the host; 0: it has not been there
  bool superseded = false;  // a later version has taken over the storage
  bool used = false;        // some recipe has read it
  bool escaped = false;     // other code may write to the memory unnoticed, now or later
  bool away = false;        // a constant whose content the program has taken away, and will bring back (away.h)
  bool fixed = false;       // the memory must stay where it is, though nothing else writes to it
  bool of_backward = false;  // a backward pass has made it
  uint8_t device = 0;       // whose account it is in (`Ledger::use`)
  Pin pin = nullptr;
  StorageRef scratch;  // a storage that dtrrun holds for it: recomputed, or the copy of a constant that has changed since
  StorageRef copy;     // copy of a constant that is about to change: its storage once it has been superseded
  std::shared_ptr<Debts> debts;  // of the ledger that counts its copy
  std::unique_ptr<HostCopy> host;  // its copy on the host
  std::unique_ptr<Dependents> needed_by;  // versions whose secured recipes read this one
  Version *before = nullptr, *after = nullptr;          // links of the list in `Versions`

  Version() : Node() { resident = true; }
  Version(const Version&) = delete;
  ~Version() {
    if (debts) debts->copied_bytes += nbytes;
    leave_weak_references();
  }
  // Called when it is about to be freed: weak references become null.
  void leave_weak_references() {
    if (cell_ == nullptr) return;
    cell_->version = nullptr;
    WeakVersion::let_go(std::exchange(cell_, nullptr));
  }

  // Returns whether it has no memory, but can be brought back from the host.
  bool has_left() const { return !resident && host != nullptr; }
  // Returns whether it has neither, and has to be computed again.
  bool is_dropped() const { return !resident && host == nullptr; }
  void set_scratch(StorageRef storage) {
    scratch = std::move(storage);
    released = static_cast<bool>(scratch);
  }
  // Calls `function` with each version in `needed_by` that is still there.
  template <class Function>
  void each_dependent(const Function& function) const {
    if (!needed_by) return;
    for (size_t i = 0; i < needed_by->size(); i++)
      if (Version* node = (*needed_by)[i].get()) function(node);
  }

 private:
  friend class WeakVersion;
  WeakVersion::Cell* cell_ = nullptr;
};

inline WeakVersion::WeakVersion(Version* version) {
  if (version->cell_ == nullptr) version->cell_ = new Cell(version);
  cell_ = version->cell_;
  cell_->references++;
}

inline Version* as_version(Node* node) { return static_cast<Version*>(node); }
inline const Version* as_version(const Node* node) { return static_cast<const Version*>(node); }

// An owning reference to a version.
class VersionRef {
 public:
  VersionRef() = default;
  explicit VersionRef(Version* borrowed) : kept_(borrowed) {}
  explicit VersionRef(KeptNode kept) : kept_(std::move(kept)) {}
  VersionRef(VersionRef&&) noexcept = default;
  VersionRef& operator=(VersionRef&&) noexcept = default;
  Version* get() const { return as_version(kept_.get()); }
  Version* operator->() const { return get(); }
  explicit operator bool() const { return get() != nullptr; }

 private:
  KeptNode kept_;
};

// -- operations -----------------------------------------------------------------------------------------------

// What all calls of one operator on tensors of the same geometry share (`core.graph.Signature`).
struct Signature {
  static constexpr int64_t SETTLED = 8;  // number of calls after which the cost is fixed
  int64_t calls = 0, cost = 0, output_bytes = 0, workspace = 0;
  bool guessed = false;
  bool timed = false;  // exactly, on a GPU

  void learn_cost(int64_t measured) {
    if (calls >= SETTLED) return;
    if (calls == 0 || measured < cost) cost = measured;
    calls++;
  }
  // This signature is for replays that omit some of the tensors: they cost and allocate the same as the calls with `other`.
  void resemble(const Signature& other) {
    cost = other.cost;
    output_bytes = other.output_bytes;
    guessed = other.guessed;
  }
  // The results took `nbytes`: expect that of the next call, or the maximum if it varies. opaque: one result is a workspace.
  // measured: the expectation includes other workspaces, too, and takes precedence.
  void learn_bytes(int64_t nbytes, bool opaque, bool varies, bool measured) {
    if (!guessed && nbytes == output_bytes) return;
    bool lower = !measured && (guessed || opaque) && !varies;
    guessed = false;
    if (nbytes > output_bytes || lower) output_bytes = nbytes;
  }
};

// One of an operation's tensors: a version, or one that it overwrites completely without reading it (`core.graph.Overwritten`).
struct TensorEntry {
  Version* version = nullptr;    // kept alive by the operation's reads; null: overwritten
  int64_t nbytes = 0,
          size = 0;  // if overwritten: the bytes as a version counts them; those of the storage that a replay allocates
  int64_t same = -1;             // the place of an earlier tensor over the same overwritten storage; -1: none
};

// A version that an operation makes. where >= 0: an index into the results; otherwise ~where is the tensor whose memory it writes.
struct Output {
  int64_t where;
  WeakVersion version;
};

// A recipe: a recorded operator call that can be run again. It holds no reference to any tensor.
struct Recorded : Operation {
  Signature* signature = nullptr;
  int64_t where = 0;                                  // of its output, if it has exactly one
  int64_t seen = 0;                                   // number of the last search that has come to it
  std::unique_ptr<std::vector<Output>> outputs;       // null if it has exactly one
  std::unique_ptr<std::vector<TensorEntry>> tensors;  // null if they are exactly what it reads
  // What is kept alive so that it can be replayed, once something that it makes has been evicted.
  struct Held {
    std::vector<StorageRef> constants;    // constants that something evicted is computed from
    std::vector<StorageRef> kept_inputs;  // inputs that were resident when the output was evicted
    int64_t times_kept = 0;               // how often `kept_inputs` has been set
  };
  std::unique_ptr<Held> held;

  Recorded() : Operation{nullptr, 0} {}
  Recorded(const Recorded&) = delete;

  Held& hold() {
    if (!held) held = std::make_unique<Held>();
    return *held;
  }
  void keep(std::vector<StorageRef> inputs) {
    if (!held && inputs.empty()) return;
    std::swap(hold().kept_inputs, inputs);
    held->times_kept++;
  }
  size_t tensor_count() const { return tensors ? tensors->size() : count; }
  TensorEntry tensor(size_t place) const { return tensors ? (*tensors)[place] : TensorEntry{as_version(reads[place])}; }
  int64_t reads_of(const Version* version) const { return std::count(begin(), end(), static_cast<const Node*>(version)); }

  // Calls function(where, version) for each version that it makes, including `one`.
  template <class Function>
  void each_made(Version* one, const Function& function) const {
    if (!outputs) return function(where, one);
    for (size_t i = 0; i < outputs->size(); i++)
      if (Version* made = (*outputs)[i].version.get()) function((*outputs)[i].where, made);
  }
  // Calls function(place) for each of its tensors that it writes to.
  template <class Function>
  void each_written(const Function& function) const {
    auto tell = [&](int64_t place) {
      if (place < 0) function(static_cast<size_t>(~place));
    };
    if (!outputs) return tell(where);
    for (const Output& one : *outputs) tell(one.where);
  }
};

// Sets what an operation makes.
inline void set_outputs(Recorded& one, std::vector<Output> outputs) {
  one.where = outputs.size() == 1 ? outputs[0].where : 0;
  one.outputs.reset();
  if (outputs.size() != 1) one.outputs = std::make_unique<std::vector<Output>>(std::move(outputs));
}

inline Recorded* maker_of(const Version* version) { return static_cast<Recorded*>(version->operation); }

// Frees an operation whose last reference is gone. Set by the extension.
inline void (*free_operation)(Operation*) = nullptr;

inline void keep(Operation* operation) { operation->kept++; }

// Drops a reference to an operation. The last one also frees what only the operation kept alive, then what that was computed from,
// and so on. Limits the recursion, since a long chain would overflow the stack.
inline void let_go(Operation* operation) {
  constexpr int DEEPEST = 50;
  static std::vector<Operation*>& waiting = *new std::vector<Operation*>;
  static int depth = 0;
  if (--operation->kept != 0) return;
  if (depth == DEEPEST) {
    waiting.push_back(operation);
    return;
  }
  depth++;
  free_operation(operation);
  depth--;
  while (depth == 0 && !waiting.empty()) {
    Operation* next = waiting.back();
    waiting.pop_back();
    depth++;
    free_operation(next);
    depth--;
  }
}

// An owning reference to an operation.
class OperationRef {
 public:
  OperationRef() = default;
  explicit OperationRef(Recorded* borrowed) : operation_(borrowed) {
    if (borrowed != nullptr) keep(borrowed);
  }
  OperationRef(OperationRef&& other) noexcept : operation_(std::exchange(other.operation_, nullptr)) {}
  OperationRef& operator=(OperationRef&& other) noexcept {
    std::swap(operation_, other.operation_);
    return *this;
  }
  ~OperationRef() {
    if (operation_ != nullptr) let_go(operation_);
  }
  Recorded* get() const { return operation_; }
  Recorded* operator->() const { return operation_; }
  explicit operator bool() const { return operation_ != nullptr; }

 private:
  Recorded* operation_ = nullptr;
};

// Sets the recipe of a version. operation: null makes the version a constant.
inline void set_operation(Version* version, Operation* operation) {
  if (operation != nullptr) keep(operation);
  if (Operation* before = std::exchange(version->operation, operation)) let_go(before);
}

// -- the program ----------------------------------------------------------------------------------------------

// The present versions of all storages, in the order in which the storages were entered.
using VersionList = std::vector<Version*>;

// Tells which storages the program still has.
class Program {
 public:
  virtual ~Program() = default;
  // Returns whether the program still holds the storage that a version has or had.
  virtual bool has_storage(const Version* version) const = 0;

  bool has(const Version* version) const { return !version->superseded && has_storage(version); }
  // Returns whether there is a storage that holds the version's bytes, provided that it is resident.
  bool has_place(const Version* version) const { return version->released || has(version); }
};

// Returns whether a constant is of a kind that is expected to change.
inline bool is_weight(const Version* version) {
  Pin pin = version->pin;
  return pin != nullptr &&
         (pin == pins::PARAMETER || pin == pins::RUNNING_STATISTICS || pin == pins::UPDATED_IN_PLACE || pin == pins::MUTATED);
}

}  // namespace dtrrun
