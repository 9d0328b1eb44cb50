#include "eviction.h"

#include <cmath>

namespace dtrrun {

bool Eviction::try_room(int64_t nbytes) {
  if (!sending_.empty()) settle_sent();
  ledger_.collect_dead();
  nbytes += ledger_.reserved_bytes;
  if (fits(nbytes)) return true;
  ledger_.backend.look_outside();
  return fits(nbytes) || evict_to(ledger_.limit - nbytes);
}

bool Eviction::evict_to(int64_t most) {
  int64_t started = now_ns();
  Evicting evicting(ledger_.backend);
  begin_pressure();
  let_results_leave();
  if (ledger_.replaying == 0 && ledger_.recomputed_ns >= ledger_.collection_due_ns) ledger_.backend.collection_due();
  bool done = true, copies = false;
  while (ledger_.resident_bytes > most) {
    if (free_brought()) continue;
    if (deallocation_.free_unread_scratch(evictions)) continue;
    int64_t began = ledger_.backend.begins();
    VersionRef victim = choose();
    if (began != 0) ledger_.backend.searched(victim.get(), began);
    VersionRef constant = constant_in_place_of(victim.get());
    if (constant && send(constant.get())) {
      copies = true;
      continue;
    }
    if (victim) {
      StorageRef storage = ledger_.backend.storage_of(victim.get());  // keeps it alive while its recipe is secured
      if (recipes_.secure(victim.get())) {  // otherwise it is a constant now
        expel(victim.get(), storage);
        copies = copies || victim->has_left();
      }
    } else if (ledger_.some_died()) {
      ledger_.collect_dead();
    } else if (int64_t before = ledger_.unlocks; most < 0 || !ledger_.backend.collect_garbage()) {  // below 0: nothing would do
      if (ledger_.unlocks != before) continue;  // other threads have had their turns meanwhile
      if (let_constants_leave(most)) continue;
      done = false;
      break;
    }
  }
  if (copies && done) send_ahead();
  ledger_.least_evictable = std::min(ledger_.least_evictable, ledger_.policy->evictable_bytes());
  making_room_ns += now_ns() - started;
  return done;
}

VersionRef Eviction::choose() {
  auto select = [&](const Evictable& evictable) { return VersionRef(ledger_.policy->select(ledger_.clock, evictable)); };
  auto possible = [&](Node* node) { return may_be_evicted(as_version(node)); };
  int64_t dear = dear_from();
  if (dear == UNLIMITED) return select(possible);
  int passed_over = 0;
  VersionRef found = select([&](Node* node) {
    if (!possible(node)) return false;
    if (passed_over == MOST_PASSED_OVER || as_version(node)->scratch || !is_dear(as_version(node), dear)) return true;
    passed_over++;
    return false;
  });
  bool is_cheap = found && passed_over < MOST_PASSED_OVER;
  return is_cheap || passed_over == 0 ? std::move(found) : select(possible);
}

int64_t Eviction::dear_from() const {
  if (dear_part == 0 || goes_over()) return UNLIMITED;
  int64_t cost = std::max(ledger_.step_work, ledger_.own_work() - ledger_.step_began) / dear_part;
  return cost > 0 ? cost : UNLIMITED;
}

bool Eviction::is_dear(Version* one, int64_t cost) {
  if (cost_of_copy(one) < cost) return false;
  pending_.assign(1, one);
  size_t counted = 0;
  int64_t search = next_search();
  while (!pending_.empty()) {
    Recorded* maker = maker_of(pending_.back());
    pending_.pop_back();
    if (maker == nullptr || !newly_seen(maker, search)) continue;
    counted++;
    cost -= maker->signature->cost;
    if (cost <= 0 && counted > FEW) return true;
    for (Node* node : *maker)
      if (as_version(node)->is_dropped()) pending_.push_back(as_version(node));
  }
  return false;
}

bool Eviction::evict_if_possible(Version* one) {
  Ledger::Using now(ledger_, one);
  Evicting evicting(ledger_.backend);
  if (one->constant()) return may_leave(one) && send(one);
  StorageRef storage = ledger_.backend.storage_of(one);
  if (!may_be_evicted(one) || !recipes_.secure(one)) return false;
  expel(one, storage);
  return true;
}

void Eviction::expel(Version* one, const StorageRef& storage) {
  if (ledger_.results_leave != ResultsLeave::NEVER) {
    if (is_copied(one) && send(one)) return;
    Ledger::forget_host_copy(one);
  }
  evict(one, storage);
}

void Eviction::evict(Version* one, const StorageRef& storage) {
  if (!storage && !one->scratch) return;  // it has died since it was chosen
  VersionRef kept(one);
  int64_t began = ledger_.backend.begins();
  evictions++;
  evicted_bytes_total += one->nbytes;
  if (one->of_backward) ledger_.evicted_of_backward++;
  ledger_.backend.tally_eviction(maker_of(one));
  if (one->scratch) {
    ledger_.drop_scratch(one);
    ledger_.policy->released(one);
  } else {
    deallocation_.keep_inputs(one);
    ledger_.backend.take_fingerprint(one);
    ledger_.emptied(one);
    ledger_.backend.empty(storage.get());
    ledger_.policy->evicted(one);
  }
  ledger_.freed(one->nbytes);
  if (began != 0) ledger_.backend.evicted(one, began);
}

// -- the host --------------------------------------------------------------------------------------------------

bool Eviction::could_leave(const Version* one) const {
  static const std::unordered_set<Pin> stay{pins::FOREIGN_MEMORY, pins::HANDED_OUT, pins::OTHER_DEVICE,      pins::PINNED,
                                            pins::READ_UNSEEN,    pins::SHARED,     pins::SHARED_BY_THREADS, pins::UNINITIALISED};
  if (one->device != 0) return false;  // the host tier copies on the first device's stream
  if (!Constants::has(one) || !one->resident || one->escaped || one->fixed || one->away || one->scratch || one->copy)
    return false;
  return stay.count(one->pin) == 0 && ledger_.backend.has_storage(one);
}

VersionRef Eviction::constant_in_place_of(Version* other) {
  VersionRef best;
  if (ledger_.constants.size() == 0) return best;
  double least = HUGE_VAL;
  if (other != nullptr) least = ledger_.policy->price(other, ledger_.clock) / static_cast<double>(other->nbytes);
  auto may_be_best = [&](const Version* one) {  // which takes less time than all else that has to be known of one
    double bound = ledger_.policy->score_at_least(cost_of_leaving(one), until_used(one));
    return bound / static_cast<double>(one->nbytes) < least;
  };
  auto compare = [&](Version* one) {
    double score = price_of_leaving(one) / static_cast<double>(one->nbytes);
    if (score >= least) return;
    least = score;
    best = VersionRef(one);
  };
  each_that_may_leave(compare, may_be_best);
  return best;
}

bool Eviction::send(Version* one) {
  StorageRef storage = ledger_.backend.storage_of(one);
  if (!storage) return false;  // it has just died
  HostTier& tier = *ledger_.tier;
  int64_t began = ledger_.backend.begins();
  while (!one->host) {
    if (tier.has_room(one->nbytes)) one->host = tier.send(storage.get(), ledger_.clock);
    if (!one->host && !give_up_copy()) return false;
  }
  tier.wait_for(*one->host, ledger_.clock);
  one->host->last_access = one->last_access;
  if (!one->constant()) ledger_.policy->discard(one);
  ledger_.backend.take_fingerprint(one);
  ledger_.emptied(one);
  ledger_.backend.empty(storage.get());
  ledger_.freed(one->nbytes);
  if (began != 0) ledger_.backend.left(one, began);
  if (tier.overlaps && !one->constant()) note_left(one);
  return true;
}

bool Eviction::give_up_copy() const {
  for (Version* one : ledger_.versions.all()) {
    if (!one->resident || !one->host) continue;
    one->host.reset();
    return true;
  }
  return false;
}

bool Eviction::is_copied(Version* one) const {
  if (!may_be_copied(one)) return false;
  return ledger_.results_leave == ResultsLeave::ALWAYS || cost_of_copy(one) < ledger_.policy->projected_cost(one);
}

bool Eviction::may_be_copied(const Version* one) const {
  if (ledger_.results_leave == ResultsLeave::NEVER || one->device != 0 || one->nbytes < ledger_.least_copy_bytes) return false;
  if (one->scratch || one->escaped || one->fixed) return false;
  return one->host || ledger_.tier->has_room(one->nbytes);
}

void Eviction::let_results_leave() {
  if (ledger_.results_leave == ResultsLeave::NEVER) return;
  const HostTier& tier = *ledger_.tier;
  int64_t cost = tier.has_room(TYPICAL) ? tier.cost(TYPICAL, /*is_there=*/false) : UNLIMITED;
  bool falls = cost < told_cost_ - told_cost_ / 8;
  told_cost_ = falls ? cost : std::max(told_cost_, cost);
  if (ledger_.policy->may_copy() && !falls) return;
  ledger_.policy->let_copy([this](const Node* node) { return cost_of_copy(as_version(node)); });
}

bool Eviction::let_constants_leave(int64_t most) {
  if (!ledger_.tier || most <= 0) return false;
  bool leave = ledger_.constants_leave, adopts = std::exchange(ledger_.some_unknown, false);
  if (leave && !adopts) return false;
  if (adopts) ledger_.backend.adopt_counted();
  ledger_.let_constants_leave();
  if (!constant_in_place_of(nullptr)) return false;
  if (!leave) ledger_.backend.constants_leave();
  return true;
}

void Eviction::bring_back(Version* one) {
  Ledger::Using now(ledger_, one);
  struct Locked {
    VersionRef version;
    explicit Locked(Version* one) : version(one) { one->locks++; }
    ~Locked() { version->locks--; }
    Locked(const Locked&) = delete;
  } meanwhile(one);
  if (!one->host->brought) make_room(one->nbytes, nullptr, "a tensor that comes back from the host");
  StorageRef storage = ledger_.backend.storage_of(one);
  if (one->resident || !storage) return;
  int64_t began = ledger_.backend.begins();
  bool was_brought = static_cast<bool>(one->host->brought);
  ledger_.backend.bring(*one->host, storage.get(), ledger_.clock);
  if (was_brought) ledger_.no_longer_brought(one);
  one->period = std::max<int64_t>(ledger_.clock - one->host->last_access, 1);
  ledger_.restored(one);
  if (began != 0) ledger_.backend.returned(one, began);
  HostTier& tier = *one->host->tier;
  if (!one->constant()) {
    ledger_.evictable(one);
    if (tier.nbytes > tier.most_bytes / 2) Ledger::forget_host_copy(one);
  }
  if (tier.overlaps) fetch_ahead();
}

// -- copies ahead ----------------------------------------------------------------------------------------------

void Eviction::send_ahead() {
  if (ledger_.device != 0) return;
  HostTier& tier = *ledger_.tier;
  if (!tier.overlaps || !tier.is_idle(tier.out(), ledger_.clock)) return;
  settle_sent();
  VersionRef next = choose(), constant = constant_in_place_of(next.get());
  if (constant)
    next = std::move(constant);
  else if (next && !is_copied(next.get()))
    return;  // it will be dropped
  if (!next || next->host || !tier.has_room(next->nbytes)) return;
  StorageRef storage = ledger_.backend.storage_of(next.get());
  if (!storage) return;
  next->host = tier.send(storage.get(), ledger_.clock, /*ahead=*/true);
  if (!next->host) return;
  next->host->read = std::move(storage);
  sending_.emplace_back(next.get());
}

void Eviction::settle_sent() {
  HostTier& tier = *ledger_.tier;
  if (!tier.is_idle(tier.out(), ledger_.clock)) return;
  for (const WeakVersion& one : std::exchange(sending_, {}))
    if (Version* sent = one.get(); sent != nullptr && sent->host && sent->host->read) tier.wait_for(*sent->host, ledger_.clock);
}

void Eviction::note_left(Version* one) {
  left_.emplace_back(one);
  if (left_.size() < left_most_) return;
  auto is_back = [](const WeakVersion& other) { return other.get() == nullptr || !other.get()->has_left(); };
  left_.erase(std::remove_if(left_.begin(), left_.end(), is_back), left_.end());
  left_most_ = std::max<size_t>(64, 2 * left_.size());
}

void Eviction::fetch_ahead() {
  if (ledger_.device != 0) return;
  if (ledger_.age < fetch_from_) return;
  auto is_used = [](const WeakVersion& one) {
    return one.get() == nullptr || !one.get()->has_left() || !one.get()->host->brought;
  };
  brought_.erase(std::remove_if(brought_.begin(), brought_.end(), is_used), brought_.end());
  while (brought_.size() < MOST_BROUGHT) {
    Version* next = next_to_return();
    if (next == nullptr || !fits(next->nbytes + ledger_.reserved_bytes + (ledger_.limit >> ROOM_SHIFT))) return;
    if (!ledger_.fetch(next)) return;
    brought_.emplace_back(next);
  }
}

Version* Eviction::next_to_return() {
  auto waits = [](const Version* one) { return one != nullptr && one->has_left() && !one->host->brought; };
  for (; !left_.empty(); left_.pop_back())  // a backward pass needs first what left last
    if (Version* last = left_.back().get(); waits(last) && !last->constant()) return last;
  Version* next = nullptr;
  int64_t soonest = INT64_MAX;
  ledger_.constants.each([&](Version* one) {
    if (!waits(one) || one->period == 0) return;
    int64_t until = one->host->last_access + one->period - ledger_.clock;
    if (until < 0 || until >= soonest) return;
    soonest = until;
    next = one;
  });
  return next;
}

bool Eviction::free_brought() {
  if (ledger_.device != 0) return false;
  for (; !brought_.empty(); brought_.pop_back()) {
    Version* last = brought_.back().get();
    if (last == nullptr || !last->has_left() || !last->host->brought) continue;
    last->host->tier->let_go(*last->host);
    last->host->brought.reset();
    ledger_.no_longer_brought(last);
    ledger_.freed(last->nbytes);
    if (!last->constant()) left_.push_back(brought_.back());
    brought_.pop_back();
    fetch_from_ = ledger_.age + PAUSE;
    return true;
  }
  return false;
}

}  // namespace dtrrun
