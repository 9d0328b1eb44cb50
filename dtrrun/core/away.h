// Constants that the program takes away for a while, and brings back as they were: weights that FSDP gathers, frees and gathers again.
//
// What is computed from one may be evicted. It can't be recomputed while the constant is away, since only a collective would bring
// that back, and the other processes would have to wait for it. So before one leaves, what may be needed meanwhile is brought back
// and stays (`runtime/patches/gathered.py`). And before a constant changes that recipes read together with one that is away, it is
// copied. An operator that writes to one that is away fills it: that makes no new version.
#pragma once

#include "history.h"

namespace dtrrun {

// Returns those of `versions` that would be recomputed from one of `leaving`, or from what is away already.
inline VersionList computed_from(const VersionList& versions, const std::unordered_set<const Version*>& leaving) {
  using Verdict = Ancestry::Verdict;
  Ancestry ancestry;
  VersionList found;
  for (Version* one : versions) {
    bool needs_one = !one->constant() && ancestry.any(one, [&](const Version* source) {
      if (!source->constant()) return Verdict::ASK_ITS_INPUTS;
      return source->away || leaving.count(source) != 0 ? Verdict::YES : Verdict::NO;
    });
    if (needs_one) found.push_back(one);
  }
  return found;
}

// Returns whether something evicted would be recomputed from a constant together with one that is away.
inline bool is_read_with_away(const Version* constant) {
  std::unordered_set<const Version*> seen;
  VersionList evicted;
  std::vector<const Version*> stack{constant};
  while (!stack.empty()) {
    const Version* one = stack.back();
    stack.pop_back();
    one->each_dependent([&](Version* node) {
      if (node->constant() || node->resident || !seen.insert(node).second) return;
      evicted.push_back(node);
      stack.push_back(node);
    });
  }
  return !computed_from(evicted, {}).empty();
}

}  // namespace dtrrun
