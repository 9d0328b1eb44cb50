// Which recipes are dropped at the end of a step (`core/history.py`): those that would need storages older than the last cut, or
// that have lost an input.
#pragma once

#include <unordered_map>
#include <unordered_set>

#include "version.h"

namespace dtrrun {

// Searches what would be needed to recompute versions. A search stops at the first decisive find: after a step the loss may
// depend on thousands of operators, and one changed weight is enough.
class Ancestry {
 public:
  enum class Verdict { NO, YES, ASK_ITS_INPUTS };

  // Returns whether the verdict of `judge` on anything that is needed for `wanted` is YES.
  template <class Judge>
  bool any(const Version* wanted, const Judge& judge) {
    if (auto known = known_.find(wanted); known != known_.end()) return known->second;
    std::vector<Frame> stack{{wanted}};
    while (!stack.empty()) {
      Frame& frame = stack.back();
      Operation inputs = frame.version->inputs();
      const Version* deeper = nullptr;
      bool found = false;
      while (frame.next < inputs.count && deeper == nullptr && !found) {
        const Version* source = as_version(inputs.reads[frame.next++]);
        Verdict verdict = judge(source);
        if (verdict == Verdict::YES) {
          found = true;
        } else if (verdict == Verdict::ASK_ITS_INPUTS) {
          auto known = known_.find(source);
          if (known == known_.end())
            deeper = source;
          else
            found = known->second;
        }
      }
      if (found) {
        for (const Frame& one : stack) known_[one.version] = true;
        return true;
      }
      if (deeper != nullptr) {
        stack.push_back({deeper});
      } else {
        known_[frame.version] = false;
        stack.pop_back();
      }
    }
    return false;
  }

 private:
  struct Frame {
    const Version* version;
    uint32_t next = 0;  // index of the next of its inputs
  };
  std::unordered_map<const Version*, bool> known_;
};

// Returns the versions made since `age` that have a recipe and are `wanted`, the newest first.
template <class Wanted>
VersionList recomputable_since(const VersionList& versions, int64_t age, const Wanted& wanted) {
  VersionList found;
  for (auto one = versions.rbegin(); one != versions.rend(); ++one) {
    if ((*one)->age < age && (*one)->mutations == 0) break;  // older ones come next
    if (!(*one)->constant() && wanted(*one)) found.push_back(*one);
  }
  return found;
}

// Returns those whose recipes need storages from before `cut_age` that the program has released. What the program still has is
// judged on its own.
inline VersionList carried(const VersionList& versions, const Program& program, int64_t cut_age) {
  using Verdict = Ancestry::Verdict;
  Ancestry ancestry;
  return recomputable_since(versions, cut_age, [&](const Version* one) {
    if (one->locks != 0) return false;
    return ancestry.any(one, [&](const Version* source) {
      if (program.has(source) || source->constant()) return Verdict::NO;
      return source->age < cut_age ? Verdict::YES : Verdict::ASK_ITS_INPUTS;
    });
  });
}

// Returns those in memory whose recipes have lost an input. trusted: escaped versions that are known to be constants.
inline VersionList mutated(const VersionList& versions, const Program& program, int64_t age,
                           const std::unordered_set<const Version*>& trusted) {
  using Verdict = Ancestry::Verdict;
  Ancestry ancestry;
  auto is_there = [&](const Version* constant) {
    if (!constant->resident || !program.has_place(constant)) return false;
    return !constant->escaped || trusted.count(constant) != 0;
  };
  return recomputable_since(versions, age, [&](const Version* one) {
    if (!one->resident || !program.has_storage(one) || one->operation->secured) return false;
    return ancestry.any(one, [&](const Version* source) {
      if (source->constant()) return is_there(source) ? Verdict::NO : Verdict::YES;
      return source->operation->secured ? Verdict::NO : Verdict::ASK_ITS_INPUTS;
    });
  });
}

}  // namespace dtrrun
