// The ledger: versions by storage, what is resident or evicted, and how many bytes each takes.
//
// `resident_bytes` counts the program's tensors and those that dtrrun holds. None of the program's tensors is kept alive, except what
// something evicted is computed from: constants, and inputs that would be dear to get back (`Deallocation::keep_inputs`).
#pragma once

#include <array>
#include <unordered_map>
#include <unordered_set>

#include "backend.h"
#include "policy/policy.h"
#include "census.h"
#include "versions.h"

namespace dtrrun {

constexpr int64_t UNLIMITED = int64_t{1} << 62;
constexpr int LOOK_SHIFT = 4;  // check the heap once a sixteenth of the budget (or peak) has been freed,
constexpr int64_t LOOK_BYTES = 4 << 20;  // but at least this much

// The decisions recorded about a run. HELD: memory was recomputed for a version that the program does not have. DROPPED: that
// memory was freed. PINNED: a resident version has lost its recipe. LOST: a version that is not in memory has lost its
// recipe. REFUSED: a number of bytes did not fit; no version is involved. LEFT: a version was copied to the host and lost its memory.
// RETURNED: it has been copied back.
enum class Decision : uint64_t { EMPTIED = 1, RESTORED, HELD, DROPPED, COPIED, PINNED, LOST, REFUSED, LEFT, RETURNED };

// Which of the versions with a recipe are copied to the host, in place of being recomputed. ALWAYS: for tests.
enum class ResultsLeave : int64_t { NEVER, IF_CHEAPER, ALWAYS };

// What the tensors of one device take, while another one is in use (`Ledger::use`).
struct Account {
  int64_t resident_bytes = 0, evicted_bytes = 0, scratch_bytes = 0, copied_bytes = 0, brought_bytes = 0, reserved_bytes = 0;
  int64_t peak_bytes = 0, step_peak_bytes = 0, plain_peak_bytes = 0, limit = UNLIMITED;
  std::shared_ptr<Debts> debts = std::make_shared<Debts>();
};

class Ledger {
 public:
  Ledger(Backend& backend, void (*forget)(Version*)) : versions(forget), backend(backend) {}

  // -- devices --

  int64_t device = 0;  // the one in use: bytes below, peaks and the limit are those of its tensors

  // Uses another device from now on.
  void use(int64_t other) {
    if (other != device) exchange(other);
  }
  // Uses a device while it lives.
  class Using {
   public:
    Using(Ledger& ledger, int64_t device) : ledger_(ledger), before_(ledger.device) { ledger.use(device); }
    Using(Ledger& ledger, const Version* of) : Using(ledger, of->device) {}
    ~Using() { ledger_.use(before_); }
    Using(const Using&) = delete;

   private:
    Ledger& ledger_;
    const int64_t before_;
  };
  // Returns how many devices have been used.
  int64_t devices() const { return std::max<int64_t>(static_cast<int64_t>(others_.size()), 1); }
  // Calls function() with each device in use in turn.
  template <class Function>
  void each_device(const Function& function) {
    for (int64_t i = 0; i < devices(); i++) {
      Using now(*this, i);
      function();
    }
  }

  int64_t age = 0;  // number of operators so far
  int64_t clock = 0;  // ns: the total cost of all operators run
  int64_t step_age = 0;  // age of the first operator of the present step
  int64_t step_began = 0, step_work = 0;  // ns: `own_work` when it began, and what the longer of the two steps before has taken
  int64_t resident_bytes = 0, evicted_bytes = 0, scratch_bytes = 0, peak_bytes = 0, step_peak_bytes = 0, freed_bytes = 0;
  int64_t copied_bytes = 0;  // the part of `resident_bytes` in copies of constants
  int64_t brought_bytes = 0;  // the part in what has been brought back from the host ahead
  int64_t plain_peak_bytes =
      0;  // the most that the program's tensors took together, whether evicted or not: its peak without dtrrun
  int64_t reserved_bytes = 0;  // for operators in progress; other threads may not take them
  int64_t budget_bytes = -1;  // -1: none
  int64_t limit = UNLIMITED;  // what tensors may take
  bool in_backward = false;  // whether the operator in progress belongs to a backward pass
  // In this step: the least bytes that could have been evicted further after an eviction, how often something was evicted that a
  // backward pass had made, and how many operators were only counted.
  int64_t least_evictable = UNLIMITED, evicted_of_backward = 0, operators_counted = 0;
  int64_t least_bytes = 0;  // smaller storages are not worth a search
  int64_t recomputed_ns = 0;  // spent running operators again
  int64_t recomputed_cost = 0;  // the part of `clock` that they are
  int64_t unlocks = 0;  // how often an operator has released what it had locked
  int64_t collection_due_ns = UNLIMITED;  // once `recomputed_ns` reaches this, garbage is collected when room is made
  int64_t replaying = 0;  // rematerializations in progress
  int64_t paused = 0;  // nesting depth of requests to disable eviction
  bool some_away = false;  // whether a constant was ever away
  bool constants_leave = false;  // whether constants may leave for the host: only once nothing else could make room
  ResultsLeave results_leave = ResultsLeave::NEVER;  // which results may leave for the host
  bool pressure = false;  // whether memory ever ran short; until then the policy is not notified of anything
  int64_t decisions = 0;
  uint64_t digest = 0;

  Policy* policy = nullptr;  // may change between operators
  std::shared_ptr<DeadVersions> dead = std::make_shared<DeadVersions>();
  std::shared_ptr<Debts> debts = std::make_shared<Debts>();
  Versions versions;
  Scratch scratch;
  std::shared_ptr<HostTier> tier;  // null: nothing leaves
  Constants constants;  // empty until some have to leave
  Census* census = nullptr;  // null: everything has a version
  int64_t census_bytes = 0;  // the part of `resident_bytes` that is of storages without versions
  bool some_unknown = false;  // whether counting has left some behind that nobody has looked for
  int64_t least_copy_bytes = 4096;  // what is smaller is not worth a copy on the host
  int64_t left_bytes = 0, left_peak_bytes = 0;  // the part of `evicted_bytes` that is of constants on the host
  Backend& backend;

  // Returns the total cost of the program's own operators, in ns.
  int64_t own_work() const { return clock - recomputed_cost; }

  // -- versions --

  // Returns the storage that holds a version's bytes, or an empty reference.
  StorageRef memory_of(const Version* one) const {
    if (one->scratch) return one->scratch;
    return one->superseded ? StorageRef() : backend.storage_of(one);
  }
  // Adds a resident version with a recipe to the policy, if it is large enough.
  void evictable(Version* one) {
    if (pressure && one->nbytes >= least_bytes) policy->insert(one);
  }
  // Enters a version whose storage has memory now, and counts its bytes.
  void enter(Version* one) {
    Using now(*this, one);
    versions.put(one);
    resident_bytes += one->nbytes;
    note_peak(resident_bytes);
    if (one->constant()) add_constant(one);
  }
  // Called when memory runs short. The first time, reports everything so far to the policy.
  void begin_pressure() {
    if (pressure) return;
    pressure = true;
    std::vector<Version*> stack;
    for (Version* one : versions.all()) {
      if (one->constant()) continue;
      stack.push_back(one);
      if (one->resident) evictable(one);
    }
    std::unordered_set<Version*> seen;
    while (!stack.empty()) {
      Version* one = stack.back();
      stack.pop_back();
      for (Node* read : one->inputs()) {
        Version* source = as_version(read);
        if (source->constant() || source->resident || !seen.insert(source).second) continue;
        stack.push_back(source);
        policy->released(source);
      }
    }
  }
  // Called when only constants are left that could make room. From now on they may leave for the host.
  void let_constants_leave() {
    if (constants_leave) return;
    constants_leave = true;
    for (Version* one : versions.all())
      if (one->constant()) add_constant(one);
  }
  // Adds a constant to those that may leave, if it is the program's and large enough.
  void add_constant(Version* one) {
    if (!constants_leave || one->nbytes < least_copy_bytes || Constants::has(one)) return;
    if (versions.find(one->key) == one) constants.add(one);
  }
  // Called when a version is about to be written to: its copy on the host would be out of date.
  static void forget_host_copy(Version* one) { one->host.reset(); }
  // Returns all versions: those with memory, those whose memory is evicted, and what they were computed from.
  VersionList known() const {
    VersionList found;
    std::unordered_set<Version*> seen;
    auto add = [&](Version* one) {
      if (!seen.insert(one).second) return false;
      found.push_back(one);
      return true;
    };
    for (Version* one : versions.all()) add(one);
    for (const VersionRef& one : scratch.all()) add(one.get());
    VersionList stack = found;
    while (!stack.empty()) {
      Version* one = stack.back();
      stack.pop_back();
      for (Node* read : one->inputs())
        if (add(as_version(read))) stack.push_back(as_version(read));
    }
    return found;
  }

  // -- decisions --

  // Adds a decision to the digest: what, when, and about which version. Two runs of a program that make the same decisions have
  // equal digests, so nothing here may depend on addresses or on time.
  void decided(Decision decision, int64_t nbytes, int64_t made_at, int64_t mutations) {
    uint64_t what = (static_cast<uint64_t>(age) << 4 | static_cast<uint64_t>(decision)) * 0x9E3779B97F4A7C15ull ^
                    static_cast<uint64_t>(made_at) * 0xC2B2AE3D27D4EB4Full ^
                    (static_cast<uint64_t>(nbytes) + (static_cast<uint64_t>(mutations) << 48)) * 0xFF51AFD7ED558CCDull;
    uint64_t mixed = digest ^ what;
    digest = (mixed << 29 | mixed >> 35) * 0xC4CEB9FE1A85EC53ull;
    decisions++;
  }
  void decided(Decision decision, const Version* one) { decided(decision, one->nbytes, one->age, one->mutations); }

  // -- bytes --

  // Updates the peak with the bytes in memory at this moment.
  void note_peak(int64_t nbytes) {
    if (replaying == 0)  // a replay makes nothing that the program does not have already
      plain_peak_bytes = std::max(plain_peak_bytes, nbytes + evicted_bytes - scratch_bytes - copied_bytes - brought_bytes);
    tell_census();
    if (nbytes <= step_peak_bytes) return;
    step_peak_bytes = nbytes;
    peak_bytes = std::max(peak_bytes, nbytes);
  }
  // Whether operators are only counted at present, and nothing may be evicted. `Recipes::end_counting` ends it.
  bool counting() const { return census != nullptr && census->counting.load(std::memory_order_relaxed); }
  // Whether operators of backward passes are that make little.
  bool counts_backward() const { return census != nullptr && census->backward.load(std::memory_order_relaxed); }
  // Changes what tensors may take. If that is less, less is ample.
  void set_limit(int64_t nbytes) {
    limit = nbytes;
    if (counting() && nbytes < UNLIMITED) census->ample = std::min(census->ample.load(), nbytes / census->share);
    if (counts_backward()) census->ample = nbytes;
  }
  // Whether memory is ample with so many bytes more. Only while counting.
  bool is_ample(int64_t nbytes) const { return resident_bytes + nbytes <= census->ample.load(std::memory_order_relaxed); }
  // Accounts for what has been counted since the last call.
  void settle() {
    if (census == nullptr) return;
    Using first(*this, int64_t{0});  // what others have is not counted
    int64_t now = census->bytes.load(std::memory_order_acquire);
    if (now == census_bytes && !census->any()) return;
    int64_t operators = census->operators.exchange(0, std::memory_order_relaxed);
    age += operators;
    operators_counted += operators;
    int64_t most = census->most.exchange(0, std::memory_order_relaxed);
    resident_bytes += now - census_bytes;
    census_bytes = now;
    note_peak(most);
  }
  // Called when what has a version takes more or fewer bytes.
  void tell_census() {
    if (census != nullptr && device == 0) census->others.store(resident_bytes - census_bytes, std::memory_order_release);
  }
  // Accounts for a version of the program that is about to lose its memory: for the host if there is a copy.
  void emptied(Version* one) {
    Using now(*this, one);
    decided(one->host ? Decision::LEFT : Decision::EMPTIED, one);
    one->resident = false;
    resident_bytes -= one->nbytes;
    tell_census();
    evicted_bytes += one->nbytes;
    if (one->constant()) constant_has_left(one);
  }
  // A constant is not in memory any more, or what is not in memory has become one.
  void constant_has_left(const Version* one) { left_peak_bytes = std::max(left_peak_bytes, left_bytes += one->nbytes); }
  // Accounts for an evicted version of the program that has its memory back.
  void restored(Version* one) {
    Using now(*this, one);
    decided(one->host ? Decision::RETURNED : Decision::RESTORED, one);
    if (one->constant()) left_bytes -= one->nbytes;
    one->resident = true;
    evicted_bytes -= one->nbytes;
    resident_bytes += one->nbytes;
    note_peak(resident_bytes);
    backend.compare_fingerprint(one);
  }
  // Begins to bring back a version that has left, ahead of its use. Returns whether there is memory for it.
  bool fetch(Version* one) {
    Using now(*this, one);
    StorageRef storage = backend.storage_of(one);
    if (!storage || !tier->fetch(*one->host, storage.get(), clock)) return false;
    one->host->brought_bytes = one->nbytes;
    one->host->debts = debts;
    brought_bytes += one->nbytes;
    resident_bytes += one->nbytes;
    note_peak(resident_bytes);
    return true;
  }
  // What was brought back ahead has been used, or is freed.
  void no_longer_brought(const Version* one) {
    Using now(*this, one);
    brought_bytes -= one->nbytes;
    resident_bytes -= one->nbytes;
  }
  // Keeps a recomputed storage for a version that the program does not have.
  void hold_scratch(Version* one, StorageRef storage) {
    Using now(*this, one);
    decided(Decision::HELD, one);
    scratch.add(one);
    scratch_bytes += one->nbytes;
    resident_bytes += one->nbytes;
    one->set_scratch(std::move(storage));
    one->resident = true;
    note_peak(resident_bytes);
  }
  // Frees the memory that dtrrun holds for a version.
  void drop_scratch(Version* one) {
    Using now(*this, one);
    decided(Decision::DROPPED, one);
    VersionRef kept(one);  // the list may hold the last reference
    if (scratch.remove(one)) {
      scratch_bytes -= one->nbytes;
      resident_bytes -= one->nbytes;
    }
    tell_census();
    give_back_copy(one);
    one->set_scratch(StorageRef());
    one->resident = false;
  }
  // Keeps a copy of a constant that is about to change, for as long as some recipe reads this version.
  void keep_copy(Version* one, StorageRef storage) {
    Using now(*this, one);
    decided(Decision::COPIED, one);
    resident_bytes += one->nbytes;
    copied_bytes += one->nbytes;
    one->copy = std::move(storage);
    one->debts = debts;
    note_peak(resident_bytes);
  }
  // Called when another version has taken over this one's storage. This one uses its copy instead, if there is one.
  void use_copy(Version* one) {
    one->set_scratch(std::move(one->copy));
    one->copy.reset();
    one->resident = static_cast<bool>(one->scratch);
  }
  // Gives back a copy, which still counts until `collect_dead` runs.
  static void give_back_copy(Version* one) {
    if (auto debts = std::exchange(one->debts, nullptr)) debts->copied_bytes += one->nbytes;
  }

  // Notes that the program takes a constant away, and will bring it back (away.h).
  void take_away(Version* one) { some_away = one->away = true; }

  // -- deaths --

  bool some_died() const {
    bool counted = census != nullptr && (census->any() || census->bytes.load(std::memory_order_relaxed) != census_bytes);
    auto owes = [](const Debts& one) { return one.copied_bytes != 0 || one.brought_bytes != 0 || one.counted_bytes != 0; };
    if (counted || dead->any() || owes(*debts)) return true;
    return std::any_of(others_.begin(), others_.end(), [&](const Account& one) { return owes(*one.debts); });
  }

  // Accounts for the storages that died since the last call.
  void collect_dead() {
    if (!some_died()) return;
    settle();
    int64_t before = resident_bytes;
    while (dead->any()) {
      VersionRef first = dead->pop();
      Version* one = first.get();
      if (versions.find(one->key) != one) continue;  // superseded by a later version
      try {
        backend.died(one);  // while it is still in the table: until it leaves, no other storage gets its address
      } catch (...) {  // an interrupt: the death will be reported again
        dead->prepend(std::move(first));
        throw;
      }
      versions.remove(one->key);
      gone(one);
    }
    each_device([&] {
      int64_t copied = std::exchange(debts->copied_bytes, 0);
      copied_bytes -= copied;
      int64_t brought = std::exchange(debts->brought_bytes, 0);
      brought_bytes -= brought;
      resident_bytes -= copied + brought + std::exchange(debts->counted_bytes, 0);
      tell_census();
    });
    if (before != resident_bytes) freed(before - resident_bytes);
  }

  // Occasionally checks what became of the memory that was given back to the C library.
  void freed(int64_t nbytes) {
    if (!backend.has_heap()) return;
    freed_bytes += nbytes;
    if (freed_bytes <= std::max((budget_bytes < 0 ? peak_bytes : limit) >> LOOK_SHIFT, LOOK_BYTES)) return;
    freed_bytes = 0;
    backend.check_heap();
  }

  // -- operators in progress --

  void reserve(int64_t call, uint64_t thread, int64_t nbytes) {
    reserved_.push_back({call, thread, nbytes, device});
    reserved_bytes += nbytes;
  }
  // Returns whether something was reserved for this call.
  bool give_back(int64_t call) {
    auto place = std::find_if(reserved_.begin(), reserved_.end(), [&](const auto& one) { return one.call == call; });
    if (place == reserved_.end()) return false;
    Using now(*this, place->device);
    reserved_bytes -= place->nbytes;
    reserved_.erase(place);
    return true;
  }
  bool any_reserved_by_others(uint64_t thread) const {
    return std::any_of(reserved_.begin(), reserved_.end(), [&](const auto& one) { return one.thread != thread; });
  }
  // Accounts for an operator of the program that has run.
  void ran(Signature& signature, int64_t cost) {
    signature.learn_cost(cost);
    clock += signature.cost;
    age++;
  }

 private:
  struct Reservation {
    int64_t call;
    uint64_t thread;
    int64_t nbytes, device;
  };

  void exchange(int64_t other) {
    while (others_.size() <= static_cast<size_t>(std::max(device, other))) {
      others_.emplace_back();
      if (budget_bytes >= 0) others_.back().limit = budget_bytes;
    }
    swap_with(others_[static_cast<size_t>(device)]);
    swap_with(others_[static_cast<size_t>(other)]);
    device = other;
  }
  void swap_with(Account& one) {
    for (auto [own, figure] : FIGURES) std::swap(this->*own, one.*figure);
    std::swap(debts, one.debts);
  }
  static const std::array<std::pair<int64_t Ledger::*, int64_t Account::*>, 10> FIGURES;

  // Accounts for a version that was in the table and that the program has released.
  void gone(Version* one) {
    Using now(*this, one);
    if (one->constant_place != 0) constants.remove(one);
    if (one->constant() && one->has_left()) left_bytes -= one->nbytes;
    one->host.reset();  // a recipe may keep the version
    if (one->scratch) {  // it died while evicted and held by a rematerialization: any memory left is scratch
      evicted_bytes -= one->nbytes;
    } else if (one->resident) {
      resident_bytes -= one->nbytes;
      one->resident = false;
      if (!pressure || one->constant()) return;
      policy->discard(one);
      if (one->used) policy->released(one);  // what depends on it may need it again
    } else {
      evicted_bytes -= one->nbytes;
      policy->left(one);
      if (one->used) policy->released(one);
    }
  }

  std::vector<Reservation> reserved_;
  std::vector<Account> others_;  // by device; empty while there is one
};

inline const std::array<std::pair<int64_t Ledger::*, int64_t Account::*>, 10> Ledger::FIGURES{{
    {&Ledger::resident_bytes, &Account::resident_bytes},
    {&Ledger::evicted_bytes, &Account::evicted_bytes},
    {&Ledger::scratch_bytes, &Account::scratch_bytes},
    {&Ledger::copied_bytes, &Account::copied_bytes},
    {&Ledger::brought_bytes, &Account::brought_bytes},
    {&Ledger::reserved_bytes, &Account::reserved_bytes},
    {&Ledger::peak_bytes, &Account::peak_bytes},
    {&Ledger::step_peak_bytes, &Account::step_peak_bytes},
    {&Ledger::plain_peak_bytes, &Account::plain_peak_bytes},
    {&Ledger::limit, &Account::limit},
}};

}  // namespace dtrrun
