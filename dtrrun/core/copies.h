// Which constants are worth copying before they change. For the reasons see `Copies` (mutation.h).
#pragma once

#include <deque>
#include <map>
#include <unordered_set>

#include "policy/table.h"
#include "version.h"

namespace dtrrun {

constexpr int SHARE_SHIFT = 2;          // copies may take a quarter of what depends on them
constexpr int64_t SMALL_COPY = 16 << 10;  // bytes; constants this small may be copied even if they are not expected to change

// Returns the bytes that a copy may take: a share of what the program has and recipes can recompute.
inline int64_t largest_copy(const VersionList& versions, const Program& program) {
  int64_t total = 0;
  for (const Version* one : versions)
    if (!one->constant() && program.has_storage(one)) total += one->nbytes;
  return total >> SHARE_SHIFT;
}

// Disjoint sets of versions (union-find).
class Groups {
 public:
  // Returns the representative of the set that contains this version.
  const Version* of(const Version* one) {
    const Version* top = one;
    while (const Version* upper = above_.find(number_of(top))) top = upper;
    while (one != top) {
      const Version* next = above_.find(number_of(one));
      if (next != top) above_.put(number_of(one), top);
      one = next;
    }
    return top;
  }
  void join(const Version* one, const Version* other) {
    const Version *own = of(one), *others = of(other);
    if (own != others) above_.put(number_of(own), others);
  }

  static int64_t number_of(const Version* one) { return reinterpret_cast<int64_t>(one); }

 private:
  Table<const Version> above_;
};

struct Weighed {
  std::unordered_set<int64_t> keys;  // keys of the constants that are worth a copy
  size_t looked_at;                  // number of versions looked at
};

// Weighs copies of constants against the results that need them. A result that the program has is recomputed from the constants
// that its recipe reaches through released versions. Constants and results connected in this way are weighed together: either all
// of the copies are needed, or none is of any use.
inline Weighed weigh(const VersionList& versions, const Program& program) {
  Groups groups;
  std::vector<std::pair<const Version*, const Version*>> others;  // small constants, and what reads them
  Table<const Version> weights;
  std::vector<const Version*> held, stack;
  size_t seen = 0;
  int64_t search = next_search();
  for (const Version* one : versions) {
    if (one->constant() || one->has_left() || !program.has_storage(one)) continue;
    held.push_back(one);
    stack.push_back(one);
    while (!stack.empty()) {
      const Version* reader = stack.back();
      stack.pop_back();
      for (Node* node : reader->inputs()) {
        Version* source = as_version(node);
        if (source->constant()) {
          if (source->superseded || source->escaped || !source->resident) continue;  // it has been copied, or is lost
          if (is_weight(source)) {
            weights.put(Groups::number_of(source), source);
            groups.join(reader, source);
          } else if (source->nbytes <= SMALL_COPY) {
            others.emplace_back(source, reader);
          }
        } else if (!program.has(source)) {  // released
          groups.join(reader, source);
          if (!newly_seen(source, search)) continue;
          seen++;
          stack.push_back(source);
        }
      }
    }
  }
  std::map<std::pair<const Version*, int64_t>, int64_t> read;
  weights.each([&](int64_t, const Version& one) { read[{groups.of(&one), one.key}] = one.nbytes; });
  for (auto [one, reader] : others) read[{groups.of(reader), one->key}] = one->nbytes;
  std::deque<int64_t> balances;  // for each group that has constants: the bytes held minus four times those of its constants
  Table<int64_t> balance;
  for (const auto& [place, nbytes] : read) {
    int64_t group = Groups::number_of(place.first);
    if (balance.find(group) == nullptr) balance.put(group, &balances.emplace_back(0));
    *balance.find(group) -= nbytes << SHARE_SHIFT;
  }
  for (const Version* one : held)
    if (int64_t* sum = balance.find(Groups::number_of(groups.of(one)))) *sum += one->nbytes;
  Weighed found{{}, versions.size() + seen};
  for (const auto& [place, nbytes] : read)
    if (*balance.find(Groups::number_of(place.first)) >= 0) found.keys.insert(place.second);
  return found;
}

}  // namespace dtrrun
