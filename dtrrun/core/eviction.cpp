#include "eviction.h"

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
  ledger_.begin_pressure();
  if (ledger_.replaying == 0 && ledger_.recomputed_ns >= ledger_.collection_due_ns) ledger_.backend.collection_due();
  bool done = true;
  while (ledger_.resident_bytes > most) {
    if (deallocation_.free_unread_scratch(evictions)) continue;
    int64_t began = ledger_.backend.begins();
    VersionRef victim(ledger_.policy->select(ledger_.clock, [&](Node* node) { return may_be_evicted(as_version(node)); }));
    if (began != 0) ledger_.backend.searched(victim.get(), began);
    if (victim) {
      StorageRef storage = ledger_.backend.storage_of(victim.get());  // keeps it alive while its recipe is secured
      if (recipes_.secure(victim.get())) evict(victim.get(), storage);  // otherwise it is a constant now
    } else if (ledger_.some_died()) {
      ledger_.collect_dead();
    } else if (most < 0 || !ledger_.backend.collect_garbage()) {  // below 0: it would not fit into empty memory
      done = false;
      break;
    }
  }
  making_room_ns += now_ns() - started;
  return done;
}

bool Eviction::evict_if_possible(Version* one) {
  StorageRef storage = ledger_.backend.storage_of(one);
  if (!may_be_evicted(one) || !recipes_.secure(one)) return false;
  evict(one, storage);
  return true;
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

}  // namespace dtrrun
