// The eviction loop (paper, Sec. 2 and App. C.4), and how versions leave for the host and return.
#pragma once

#include <optional>

#include "deallocation.h"
#include "recipes.h"

namespace dtrrun {

class Eviction {
 public:
  Eviction(Ledger& ledger, Recipes& recipes, Deallocation& deallocation)
      : ledger_(ledger), recipes_(recipes), deallocation_(deallocation) {}

  // What takes more than this part of a step to recompute is evicted last: a quarter. 0: nothing is. Variable for experiments
  // (`tests/bench/replays.py`).
  int64_t dear_part = 4;
  bool warn_only = false;  // exceed the budget and count it, instead of raising
  bool adapts =
      false;     // the limit rises to what has not fitted; otherwise everything is evicted at each operator, over the budget
  int64_t evictions = 0, evicted_bytes_total = 0, making_room_ns = 0;
  int64_t over_budget = 0;  // how often there was no room and the program went on

  // Evicts until `nbytes` more fit into the budget. of: the signature of the operator to name in the error, or null. name: what the
  // error names if `of` is null. Raises the budget error if the bytes can't be made to fit.
  void make_room(int64_t nbytes, const Signature* of, const char* name = nullptr) {
    if (!has_room(nbytes) && !try_room(nbytes)) ledger_.backend.no_room(nbytes + ledger_.reserved_bytes, of, name);
  }
  // Returns whether `nbytes` more fit already.
  bool has_room(int64_t nbytes) const { return fits(nbytes + ledger_.reserved_bytes); }
  // Like `make_room`, but returns whether the bytes fit instead of raising.
  bool try_room(int64_t nbytes);

  // Evicts until at most `most` bytes are resident. Returns false if nothing is left to evict.
  bool evict_to(int64_t most);
  // Called when memory runs short, before anything is evicted.
  void begin_pressure() {
    if (ledger_.counting()) recipes_.end_counting();
    ledger_.begin_pressure();
  }

  // Returns whether a version may be evicted, provided that its recipe can be secured.
  bool may_be_evicted(const Version* one) const {
    if (one->locks != 0 || !one->resident || one->constant() || one->device != ledger_.device) return false;
    // Without the exception, one rematerialization could take exponential time under a limit that can't be kept.
    if (one->scratch) return !(goes_over() && ledger_.replaying != 0);
    return ledger_.backend.has_storage(one);  // if not, it has just died, and `collect_dead` accounts for it
  }

  // Returns whether what does not fit is made all the same, above the limit.
  bool goes_over() const { return warn_only && !adapts; }

  // Evicts this version, whatever its score. Returns whether that was possible.
  bool evict_if_possible(Version* one);

  // Returns whether a constant may leave for the host if there is a place for it: only operators can reach its memory.
  bool may_leave(const Version* one) const { return one->locks == 0 && one->device == ledger_.device && could_leave(one); }
  // The same, whether it is locked or not.
  bool could_leave(const Version* one) const;
  // What it costs, in ns, to bring a version back, and before that to copy it out if there is no copy.
  int64_t cost_of_leaving(const Version* one) const { return ledger_.tier->cost(one->nbytes, one->host != nullptr); }
  // The projected cost, in ns, from which a version is copied instead of being recomputed; `UNLIMITED` if it may not be copied.
  int64_t cost_of_copy(const Version* one) const { return may_be_copied(one) ? SHARED * cost_of_leaving(one) : UNLIMITED; }
  // Like `Policy::price`, for a constant that leaves.
  double price_of_leaving(const Version* one) const { return ledger_.policy->score_of(cost_of_leaving(one), until_used(one)); }
  // Calls function(constant) for each that is wanted, that may leave, and for which there may be a place. wanted(constant): asked first.
  template <class Function, class Wanted>
  void each_that_may_leave(const Function& function, const Wanted& wanted) const {
    std::optional<bool> gives_up;  // whether a copy of what is in memory could make room for another, once that matters
    auto may_take = [&](const Version* one) {
      if (one->host || ledger_.tier->may_have_room(one->nbytes)) return true;
      if (!gives_up) {
        gives_up = false;
        ledger_.constants.each([&](const Version* other) { gives_up = *gives_up || (other->resident && other->host); });
      }
      return *gives_up;
    };
    ledger_.constants.each([&](Version* one) {
      if (wanted(one) && may_leave(one) && may_take(one)) function(one);
    });
  }
  // Brings back a version that has left. Raises the budget error.
  void bring_back(Version* one);

 private:
  static constexpr int MOST_PASSED_OVER = 64;  // dear versions, in the search for one that is not
  static constexpr size_t FEW = 64;  // operations fit into memory together, whatever they cost
  static constexpr int64_t SHARED = 2;  // by how much projected costs exceed what is recomputed for one version alone
  static constexpr int64_t TYPICAL = 1 << 20;  // bytes of the copy by whose cost costs are compared

  // Evictions are in progress while one lives.
  class Evicting {
   public:
    explicit Evicting(Backend& backend) : backend_(backend) { backend_.begin_evicting(); }
    ~Evicting() { backend_.end_evicting(); }
    Evicting(const Evicting&) = delete;

   private:
    Backend& backend_;
  };

  // Returns the version to be evicted next, or null.
  //
  // What takes long to recompute goes last, whatever its score. Such a version, a gradient of the middle of a network, needs most of
  // the forward pass and of the backward pass so far. If there is no room for all of that, its recomputation takes many times as
  // long as its recipes together. Scores do not know this, and a neighbourhood that is only estimated hides what is cheap.
  VersionRef choose();
  // Returns the cost in ns from which a version is dear, or `UNLIMITED`.
  int64_t dear_from() const;
  // Returns whether recomputing a version, with all that it needs and is not in memory, costs at least this much and takes more than
  // a few operations.
  bool is_dear(Version* one, int64_t cost);

  bool fits(int64_t nbytes) const { return ledger_.resident_bytes + nbytes <= ledger_.limit; }

  // Frees the memory of a version whose recipe is secured: copies it to the host if that costs less than recomputing it.
  void expel(Version* one, const StorageRef& storage);
  // Frees the memory of a version whose recipe is secured, to recompute it (App. C.4). storage: the program's, or empty.
  void evict(Version* one, const StorageRef& storage);

  // -- the host --

  // Returns the constant to send to the host instead of evicting this version, which may be null: the one whose absence costs least
  // for each byte and for the time until its next use, if that is less than what recomputing costs.
  VersionRef constant_in_place_of(Version* other);
  // Returns, in ns, in how long a constant is used again: once as much time has passed as between its uses before. Later than that,
  // nothing is known.
  int64_t until_used(const Version* one) const {
    int64_t since = ledger_.clock - one->last_access;
    return std::max<int64_t>(one->period == 0 ? since : std::abs(one->period - since), 1);
  }
  // Copies a version to the host, unless there is a copy, and frees its memory. Returns whether that was possible.
  bool send(Version* one);
  // Nothing else could make room: constants may leave from now on, those among them that were only counted. most: 0 if all is to be
  // evicted, which is not worth that. Returns whether one can that could not before.
  bool let_constants_leave(int64_t most);
  // Gives up a copy of what is in memory, since there is no place for another. Returns whether there was one.
  bool give_up_copy() const;
  // Notes that a result has left, where copies overlap with the program's work.
  void note_left(Version* one);
  // Where they do: begins to copy out what will have to leave next, if that is to be copied.
  void send_ahead();
  // The same for the way back, while there is room for it.
  void fetch_ahead();
  // Waits for what was copied out ahead, once that is over: the program may have released it meanwhile.
  void settle_sent();
  // Returns the version that has left and will be needed next, as far as that is known, or null.
  Version* next_to_return();
  // Frees what was brought back last, ahead of its use. Returns whether there was anything.
  bool free_brought();
  // Returns whether a version with a recipe is copied to the host, instead of being recomputed.
  bool is_copied(Version* one) const;
  // Returns whether it may be.
  bool may_be_copied(const Version* one) const;
  // Tells the policy what copies cost, if they may be made, and if that is new to it.
  void let_results_leave();

  Ledger& ledger_;
  Recipes& recipes_;
  Deallocation& deallocation_;
  static constexpr int ROOM_SHIFT = 3;  // copies back are made ahead while an eighth of the limit stays free
  static constexpr size_t MOST_BROUGHT = 4;  // so many at a time
  static constexpr int64_t PAUSE = 64;  // operators without them, once memory has run short for one

  int64_t told_cost_ = 0;  // of a typical copy, when the policy was told
  std::vector<WeakVersion> left_;  // results that have left, the last one last; where copies overlap
  size_t left_most_ = 64;  // then those are looked for that have come back
  std::vector<WeakVersion> sending_;  // what is being copied out ahead
  std::vector<WeakVersion> brought_;  // what has been brought back ahead, in this order
  int64_t fetch_from_ = 0;  // the ledger's age
  std::vector<Version*> pending_;  // of `is_dear`, kept for its memory
};

}  // namespace dtrrun
