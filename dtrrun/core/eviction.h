// The eviction loop (paper, Sec. 2 and App. C.4).
#pragma once

#include "deallocation.h"
#include "recipes.h"

namespace dtrrun {

class Eviction {
 public:
  Eviction(Ledger& ledger, Recipes& recipes, Deallocation& deallocation)
      : ledger_(ledger), recipes_(recipes), deallocation_(deallocation) {}

  bool warn_only = false;  // exceed the budget and count it, instead of raising
  bool adapts = false;     // the limit rises to what has not fitted; otherwise everything is evicted at each operator, over the budget
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

  // Returns whether a version may be evicted, provided that its recipe can be secured.
  bool may_be_evicted(const Version* one) const {
    if (one->locks != 0 || !one->resident || one->constant()) return false;
    // Without the exception, one rematerialization could take exponential time under a limit that can't be kept.
    if (one->scratch) return !(goes_over() && ledger_.replaying != 0);
    return ledger_.backend.has_storage(one);  // if not, it has just died, and `collect_dead` accounts for it
  }

  // Returns whether what does not fit is made all the same, above the limit.
  bool goes_over() const { return warn_only && !adapts; }

  // Evicts this version, whatever its score. Returns whether that was possible.
  bool evict_if_possible(Version* one);

 private:
  bool fits(int64_t nbytes) const { return ledger_.resident_bytes + nbytes <= ledger_.limit; }

  // Frees the memory of a version whose recipe is secured (App. C.4). storage: the program's, or empty.
  void evict(Version* one, const StorageRef& storage);

  Ledger& ledger_;
  Recipes& recipes_;
  Deallocation& deallocation_;
};

}  // namespace dtrrun
