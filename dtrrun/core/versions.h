// The present version of each storage, by the storage's key, in the order in which the storages were entered, and the queue of
// versions whose storages have died.
#pragma once

#include <deque>

#include "policy/table.h"
#include "version.h"

namespace dtrrun {

// Looks for deaths that have not been reported yet, and queues them. Set by the extension.
inline void (*settle_deaths)() = [] {};

// Versions whose storages have died, until `Ledger::collect_dead` accounts for them.
class DeadVersions {
 public:
  void append(Version* one) {
    settle_deaths();
    add(one);
  }
  void prepend(VersionRef one) { waiting_.push_front(std::move(one)); }
  bool any() const {
    settle_deaths();
    return !waiting_.empty();
  }
  Version* front() const { return waiting_.front().get(); }
  size_t size() const {
    settle_deaths();
    return waiting_.size();
  }
  VersionRef pop() {
    VersionRef first = std::move(waiting_.front());
    waiting_.pop_front();
    return first;
  }
  // Appends one. The caller has reported all earlier deaths.
  void add(Version* one) { waiting_.emplace_back(one); }

 private:
  std::deque<VersionRef> waiting_;
};

class Versions {
 public:
  // forget: called with each version that is removed or replaced.
  explicit Versions(void (*forget)(Version*)) : forget_(forget) {}
  ~Versions() { clear(); }
  Versions(const Versions&) = delete;

  // Returns a borrowed version, or null.
  Version* find(int64_t key) const { return by_key_.find(key); }

  // Enters a version, replacing the previous one of the same storage.
  void put(Version* made) {
    if (Version* old = find(made->key)) {
      if (old == made) return;
      keep(made);
      made->before = old->before;
      made->after = old->after;
      (made->before == nullptr ? first_ : made->before->after) = made;
      (made->after == nullptr ? last_ : made->after->before) = made;
      by_key_.put(made->key, made);
      changes_++;  // an iterator may point to the old one
      leave(old);
      return;
    }
    keep(made);
    by_key_.put(made->key, made);
    made->before = last_;
    made->after = nullptr;
    (last_ == nullptr ? first_ : last_->after) = made;
    last_ = made;
    changes_++;
  }

  // Returns whether there was a version.
  bool remove(int64_t key) {
    Version* one = by_key_.remove(key);
    if (one == nullptr) return false;
    (one->before == nullptr ? first_ : one->before->after) = one->after;
    (one->after == nullptr ? last_ : one->after->before) = one->before;
    changes_++;
    leave(one);
    return true;
  }

  void clear() {
    while (first_ != nullptr) remove(first_->key);
  }

  size_t size() const { return by_key_.size(); }
  uint64_t changes() const { return changes_; }
  Version* first() const { return first_; }
  Version* last() const { return last_; }
  VersionList all() const {
    VersionList found;
    for (Version* one = first_; one != nullptr; one = one->after) found.push_back(one);
    return found;
  }

 private:
  void leave(Version* one) {
    forget_(one);
    one->before = one->after = nullptr;
    let_go(one);
  }

  void (*const forget_)(Version*);
  Table<Version> by_key_;  // owning references
  uint64_t changes_ = 0;
  Version *first_ = nullptr, *last_ = nullptr;
};

// Versions in the order in which they were added. place: where a version notes its place, 0 if it is not here.
template <int64_t Version::* place>
class VersionSet {
 public:
  VersionSet() = default;
  VersionSet(const VersionSet&) = delete;
  ~VersionSet() {
    for (const VersionRef& one : all()) remove(one.get());
  }
  void add(Version* one) {
    if (places_.size() > FEW && places_.size() > 2 * size_) close_gaps();
    places_.emplace_back(one);
    one->*place = static_cast<int64_t>(places_.size());
    size_++;
  }
  // Returns whether it was there.
  bool remove(Version* one) {
    auto at = static_cast<size_t>(std::exchange(one->*place, 0));
    if (at == 0) return false;
    size_--;
    VersionRef last = std::move(places_[at - 1]);
    return true;
  }
  static bool has(const Version* one) { return one->*place != 0; }
  size_t size() const { return size_; }
  std::vector<VersionRef> all() const {
    std::vector<VersionRef> found;
    found.reserve(size_);
    each([&](Version* one) { found.emplace_back(one); });
    return found;
  }
  // Calls `function`, which must not change the set, with each version.
  template <class Function>
  void each(const Function& function) const {
    for (const VersionRef& one : places_)
      if (one) function(one.get());
  }

 private:
  static constexpr size_t FEW = 32;

  void close_gaps() {
    places_.erase(std::remove_if(places_.begin(), places_.end(), [](const VersionRef& one) { return !one; }), places_.end());
    for (size_t at = 0; at < places_.size(); at++) places_[at].get()->*place = static_cast<int64_t>(at + 1);
  }

  std::vector<VersionRef> places_;  // with gaps
  size_t size_ = 0;
};

// Recomputed versions that the program does not have, the most recent last.
using Scratch = VersionSet<&Version::scratch_place>;
// The program's constants that are large enough to be worth a copy on the host.
using Constants = VersionSet<&Version::constant_place>;

}  // namespace dtrrun
