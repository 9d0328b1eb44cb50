// The parts in which a call of an operator on lists of tensors runs, if it does not fit into the budget as a whole.
#pragma once

#include "ledger.h"

namespace dtrrun {

constexpr int PART_SHIFT = 2;  // a part takes at most a quarter of the limit, unless it is a single place of the lists

// Returns where the parts of a call end; none if it fits, or can't be split.
//
// count: the length of its lists. returns: whether it makes a result for each tensor of the first list. each(place, function): calls
// function(version) with the tensors at this place, the first list's first; null: it has not been met. alike(): returns whether parts
// compute the same.
template <class Each, class Alike>
std::vector<size_t> parts_of(Ledger& ledger, size_t count, bool returns, const Each& each, const Alike& alike) {
  if (count < 2 || (!returns && ledger.evicted_bytes == 0)) return {};
  std::vector<size_t> ends;
  bool resident = true, known = true;
  int64_t most = ledger.limit >> PART_SHIFT, made = 0, total = 0, part = 0;
  for (size_t place = 0; place < count; place++) {
    int64_t nbytes = 0, result = -1;
    each(place, [&](const Version* one) {
      known = known && one != nullptr;
      if (!known) return;
      resident = resident && one->resident;
      nbytes += one->nbytes;
      if (result < 0) result = one->nbytes;
    });
    if (!known) return {};
    if (returns) {
      nbytes += result;
      made += result;
    }
    if (part != 0 && part + nbytes > most) {
      ends.push_back(place);
      part = 0;
    }
    part += nbytes;
    total += nbytes;
  }
  int64_t room = ledger.limit - ledger.reserved_bytes;
  if (ends.empty() || (resident && ledger.resident_bytes + made <= room) || !alike()) return {};
  if (!ledger.constants_leave) {
    std::unordered_set<const Version*> listed;
    for (size_t place = 0; place < count; place++) each(place, [&](const Version* one) { listed.insert(one); });
    for (const Version* one : ledger.versions.all())
      if (one->resident && one->constant() && listed.count(one) == 0) total += one->nbytes;
    if (total <= room) return {};
    ledger.let_constants_leave();
    ledger.backend.constants_leave();
  }
  ends.push_back(count);
  return ends;
}

}  // namespace dtrrun
