// Which constants are worth a copy before they change: `Copies` (mutation.h) says why.
#pragma once

#include <map>
#include <unordered_map>
#include <unordered_set>

#include "version.h"

namespace dtrrun {

constexpr int SHARE_SHIFT = 2;          // copies may take a quarter of what depends on them
constexpr int64_t SMALL_COPY = 16 << 10;  // bytes; small constants may change, too

// The bytes that a copy may take: a share of what the program has and recipes can make.
inline int64_t largest_copy(const VersionList& versions, const Program& program) {
  int64_t total = 0;
  for (const Version* one : versions)
    if (!one->constant() && program.has_storage(one)) total += one->nbytes;
  return total >> SHARE_SHIFT;
}

// Disjoint sets of versions, joined as needed.
class Groups {
 public:
  // The version that stands for the set which has this one.
  const Version* of(const Version* one) {
    const Version* top = one;
    while (const Version* upper = above(top)) top = upper;
    while (one != top) {
      const Version*& next = above_[one];
      one = std::exchange(next, top);
    }
    return top;
  }
  void join(const Version* one, const Version* other) {
    const Version *own = of(one), *others = of(other);
    if (own != others) above_[own] = others;
  }

 private:
  const Version* above(const Version* one) const {
    auto found = above_.find(one);
    return found == above_.end() ? nullptr : found->second;
  }
  std::unordered_map<const Version*, const Version*> above_;
};

struct Weighed {
  std::unordered_set<int64_t> keys;  // of the constants that are worth a copy
  size_t looked_at;                  // how many versions have been
};

// What the program has is recomputed from the constants that its recipe leads to through what has been released. Constants and
// results that belong together in this way are weighed together: all the copies are needed, or none is of use.
inline Weighed weigh(const VersionList& versions, const Program& program) {
  Groups groups;
  std::vector<std::pair<const Version*, const Version*>> others;  // small constants, and what reads them
  std::unordered_set<const Version*> weights, seen;
  std::vector<const Version*> held, stack;
  for (const Version* one : versions) {
    if (one->constant() || !program.has_storage(one)) continue;
    held.push_back(one);
    stack.push_back(one);
    while (!stack.empty()) {
      const Version* reader = stack.back();
      stack.pop_back();
      for (Node* node : reader->inputs()) {
        const Version* source = as_version(node);
        if (source->constant()) {
          if (source->superseded || source->escaped || !source->resident) continue;  // it has a copy, or is lost
          if (is_weight(source)) {
            weights.insert(source);
            groups.join(reader, source);
          } else if (source->nbytes <= SMALL_COPY) {
            others.emplace_back(source, reader);
          }
        } else if (!program.has(source)) {  // released
          groups.join(reader, source);
          if (seen.insert(source).second) stack.push_back(source);
        }
      }
    }
  }
  std::unordered_map<const Version*, int64_t> balance;  // of each group: the bytes held, less four times those of its constants
  for (const Version* one : held) balance[groups.of(one)] += one->nbytes;
  std::map<std::pair<const Version*, int64_t>, int64_t> read;
  for (const Version* one : weights) read[{groups.of(one), one->key}] = one->nbytes;
  for (auto [one, reader] : others) read[{groups.of(reader), one->key}] = one->nbytes;
  for (const auto& [place, nbytes] : read) balance[place.first] -= nbytes << SHARE_SHIFT;
  Weighed found{{}, versions.size() + seen.size()};
  for (const auto& [place, nbytes] : read)
    if (balance[place.first] >= 0) found.keys.insert(place.second);
  return found;
}

}  // namespace dtrrun
