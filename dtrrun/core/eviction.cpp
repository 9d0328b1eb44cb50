#include "eviction.h"

#include <cmath>

namespace dtrrun {

bool Eviction::try_room(int64_t nbytes) {
  ledger_.collect_dead();
  nbytes += ledger_.reserved_bytes;
  if (fits(nbytes)) return true;
  ledger_.backend.look_outside();
  return fits(nbytes) || evict_to(ledger_.limit - nbytes);
}

bool Eviction::evict_to(int64_t most) {
  int64_t started = now_ns();
  begin_pressure();
  let_results_leave();
  if (ledger_.replaying == 0 && ledger_.recomputed_ns >= ledger_.collection_due_ns) ledger_.backend.collection_due();
  bool done = true;
  while (ledger_.resident_bytes > most) {
    if (deallocation_.free_unread_scratch(evictions)) continue;
    int64_t began = ledger_.backend.begins();
    VersionRef victim = choose();
    if (began != 0) ledger_.backend.searched(victim.get(), began);
    VersionRef constant = constant_in_place_of(victim.get());
    if (constant && send(constant.get())) continue;
    if (victim) {
      StorageRef storage = ledger_.backend.storage_of(victim.get());  // keeps it alive while its recipe is secured
      if (recipes_.secure(victim.get())) expel(victim.get(), storage);  // otherwise it is a constant now
    } else if (ledger_.some_died()) {
      ledger_.collect_dead();
    } else if (most < 0 || !ledger_.backend.collect_garbage()) {  // below 0: it would not fit into empty memory
      if (let_constants_leave(most)) continue;
      done = false;
      break;
    }
  }
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
  counted_.clear();
  while (!pending_.empty()) {
    Recorded* maker = maker_of(pending_.back());
    pending_.pop_back();
    if (maker == nullptr || !counted_.insert(maker).second) continue;
    cost -= maker->signature->cost;
    if (cost <= 0 && counted_.size() > FEW) return true;
    for (Node* node : *maker)
      if (as_version(node)->is_dropped()) pending_.push_back(as_version(node));
  }
  return false;
}

bool Eviction::evict_if_possible(Version* one) {
  if (one->constant()) return may_leave(one) && send(one);
  StorageRef storage = ledger_.backend.storage_of(one);
  if (!may_be_evicted(one) || !recipes_.secure(one)) return false;
  expel(one, storage);
  return true;
}

void Eviction::expel(Version* one, const StorageRef& storage) {
  if (ledger_.results_leave != ResultsLeave::NEVER) {
    bool copies = ledger_.results_leave == ResultsLeave::ALWAYS || cost_of_copy(one) < ledger_.policy->projected_cost(one);
    if (copies && may_be_copied(one) && send(one)) return;
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
  if (!Constants::has(one) || !one->resident || one->escaped || one->fixed || one->away || one->scratch || one->copy) return false;
  return stay.count(one->pin) == 0 && ledger_.backend.has_storage(one);
}

VersionRef Eviction::constant_in_place_of(Version* other) {
  VersionRef best;
  if (ledger_.constants.size() == 0) return best;
  double least = HUGE_VAL;
  if (other != nullptr) least = ledger_.policy->price(other, ledger_.clock) / static_cast<double>(other->nbytes);
  each_that_may_leave([&](Version* one) {
    double score = price_of_leaving(one) / static_cast<double>(one->nbytes);
    if (score >= least) return;
    least = score;
    best = VersionRef(one);
  });
  return best;
}

bool Eviction::send(Version* one) {
  StorageRef storage = ledger_.backend.storage_of(one);
  if (!storage) return false;  // it has just died
  HostTier& tier = *ledger_.tier;
  int64_t began = ledger_.backend.begins();
  while (!one->host) {
    if (tier.has_room(one->nbytes)) one->host = tier.send(storage.get());
    if (!one->host && !give_up_copy()) return false;
  }
  one->host->last_access = one->last_access;
  if (!one->constant()) ledger_.policy->discard(one);
  ledger_.backend.take_fingerprint(one);
  ledger_.emptied(one);
  ledger_.backend.empty(storage.get());
  ledger_.freed(one->nbytes);
  if (began != 0) ledger_.backend.left(one, began);
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

bool Eviction::may_be_copied(const Version* one) const {
  if (ledger_.results_leave == ResultsLeave::NEVER || one->nbytes < ledger_.least_copy_bytes) return false;
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
  if (!ledger_.tier || ledger_.constants_leave || most <= 0) return false;
  ledger_.let_constants_leave();
  if (!constant_in_place_of(nullptr)) return false;
  ledger_.backend.constants_leave();
  return true;
}

void Eviction::bring_back(Version* one) {
  struct Locked {
    VersionRef version;
    explicit Locked(Version* one) : version(one) { one->locks++; }
    ~Locked() { version->locks--; }
    Locked(const Locked&) = delete;
  } meanwhile(one);
  make_room(one->nbytes, nullptr, "a tensor that comes back from the host");
  StorageRef storage = ledger_.backend.storage_of(one);
  if (one->resident || !storage) return;
  int64_t began = ledger_.backend.begins();
  ledger_.backend.bring(*one->host, storage.get());
  one->period = std::max<int64_t>(ledger_.clock - one->host->last_access, 1);
  ledger_.restored(one);
  if (began != 0) ledger_.backend.returned(one, began);
  if (one->constant()) return;
  ledger_.evictable(one);
  HostTier& tier = *one->host->tier;
  if (tier.nbytes > tier.most_bytes / 2) Ledger::forget_host_copy(one);
}

}  // namespace dtrrun
