// The host tier: memory outside the budget, to which versions can be copied.
//
// What has no recipe (weights, gradients, an optimizer's state) can't be computed again, but it can be copied out and back. What has
// one may be faster to copy. A version may be resident, and may have a copy on the host. Only resident: as always. Neither: it has been
// dropped, and has to be computed again. Only a copy: it has left. Both: it can leave without being copied again, until it is written
// to, which drops the copy.
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>

#include "policy/clock.h"
#include "storage.h"

namespace dtrrun {

class HostTier;

// Bytes that a ledger still counts until `collect_dead` runs next. copied_bytes: of copies whose versions have gone. brought_bytes:
// of what has been brought back for versions that have gone. counted_bytes: of memory that belongs to no version and whose owners
// have gone.
struct Debts {
  int64_t copied_bytes = 0, brought_bytes = 0, counted_bytes = 0;
};

// The copy of one version. Gives its place back when it is freed.
struct HostCopy {
  std::shared_ptr<HostTier> tier;
  int64_t place;  // as the tier numbers places
  int64_t nbytes;  // of the storage; a version's bytes are rounded
  int64_t last_access = 0;  // the version's, when it left

  // Of a copy in either direction that is made ahead, until the program has waited for it.
  int64_t over = 0;  // when it will be over, by the tier's clock
  std::shared_ptr<void> event;  // which the program can wait for
  StorageRef read;  // what is being copied out: it must not be freed before

  StorageRef brought;  // memory to which it has been copied back ahead
  int64_t brought_bytes = 0;
  std::shared_ptr<Debts> debts;  // of the ledger that counts `brought`

  HostCopy(std::shared_ptr<HostTier> tier, int64_t place, int64_t nbytes) : tier(std::move(tier)), place(place), nbytes(nbytes) {}
  HostCopy(const HostCopy&) = delete;
  inline ~HostCopy();
};

// Copies are made by the program's thread or stream, which waits for them; or they overlap with its work. Then they can be ordered
// ahead: a copy out of what will have to leave next, a copy back of what will be needed next. When these are over is estimated by a
// clock: the ledger's, and the time that the program has waited. Decisions depend on this estimate alone, so they repeat.
class HostTier : public std::enable_shared_from_this<HostTier> {
 public:
  // most_bytes: that copies may take together. Times in ns for each byte are those to begin with.
  HostTier(int64_t most_bytes, double ns_out, double ns_in, bool modelled, bool overlaps = false)
      : most_bytes(most_bytes), overlaps(overlaps), modelled_(modelled), out_{ns_out}, in_{ns_in} {}
  virtual ~HostTier() = default;
  HostTier(const HostTier&) = delete;

  const int64_t most_bytes;
  const bool overlaps;
  int64_t nbytes = 0, peak_bytes = 0;  // of the copies, now and at most

  // What has been copied in one direction.
  struct Traffic {
    double ns_per_byte;
    int64_t copies = 0, nbytes = 0;
    int64_t timed_bytes = 0, timed_ns = 0, timed_copies = 0;
    double least_ns = HUGE_VAL;  // for each byte, of a copy that was timed
    int64_t ahead = 0;  // of the copies, those ordered ahead
    int64_t until = 0;  // when the last one will be over, by the tier's clock
  };
  const Traffic& out() const { return out_; }
  const Traffic& in() const { return in_; }

  // Returns whether there may be a place for this many bytes.
  bool has_room(int64_t wanted) const { return nbytes + wanted <= most_bytes && wanted < refused_; }

  // The same, if copies that are not needed are given up.
  bool may_have_room(int64_t wanted) const { return wanted <= most_bytes && wanted < refused_; }

  // Returns how long the program has waited for copies, in ns.
  int64_t waited_ns() const {
    auto all = [](const Traffic& way) { return static_cast<int64_t>(way.ns_per_byte * static_cast<double>(way.nbytes)); };
    return overlaps ? waited_ : all(out_) + all(in_);
  }
  // Returns whether all copies in this direction are over. clock: the ledger's.
  bool is_idle(const Traffic& way, int64_t clock) const { return way.until <= clock + waited_; }

  // Copies a storage out. Returns null if there is no room for it. ahead: the program does not wait for it yet; `storage` must be kept
  // until it does.
  std::unique_ptr<HostCopy> send(Storage* storage, int64_t clock, bool ahead = false) {
    int64_t wanted = size_of(storage);
    if (!has_room(wanted)) return nullptr;
    bool timed = !ahead && is_timed(out_);
    if (timed) begin_timing(wanted);
    int64_t began = now_ns();
    std::shared_ptr<void> event;
    std::optional<int64_t> place = write(storage, wanted, ahead ? &event : nullptr);
    if (!place) {
      refused_ = wanted;
      return nullptr;
    }
    count(out_, wanted, timed ? now_ns() - began : 0);
    nbytes += wanted;
    peak_bytes = std::max(peak_bytes, nbytes);
    auto made = std::make_unique<HostCopy>(shared_from_this(), *place, wanted);
    ordered(out_, *made, std::move(event), clock, ahead);
    return made;
  }
  // Copies the content back into a storage that has been emptied, unless that has been done ahead.
  void bring(HostCopy& copy, Storage* emptied, int64_t clock) {
    if (copy.brought) {
      wait_for(copy, clock);
      move(emptied, copy.brought.get());
      copy.brought.reset();
      return;
    }
    bool timed = is_timed(in_);
    if (timed) begin_timing(0);
    int64_t began = now_ns();
    StorageRef filled = read(copy.place, copy.nbytes, emptied, nullptr);
    count(in_, copy.nbytes, timed ? now_ns() - began : 0);
    move(emptied, filled.get());
    ordered(in_, copy, nullptr, clock, /*ahead=*/false);
  }
  // Begins to copy the content back ahead, into memory of its own. Returns whether there is memory for that.
  bool fetch(HostCopy& copy, Storage* emptied, int64_t clock) {
    std::shared_ptr<void> event;
    copy.brought = read(copy.place, copy.nbytes, emptied, &event);
    if (!copy.brought) return false;
    count(in_, copy.nbytes, 0);
    ordered(in_, copy, std::move(event), clock, /*ahead=*/true);
    return true;
  }
  // Has the program wait for a copy that was ordered ahead, before it uses or frees the memory.
  void wait_for(HostCopy& copy, int64_t clock) {
    wait_until(std::exchange(copy.over, 0), clock);
    let_go(copy);
  }
  // The same, if nobody needs the copy any more.
  void let_go(HostCopy& copy) {
    if (auto event = std::exchange(copy.event, nullptr)) await(event.get());
    copy.read.reset();
  }

  // Returns what it costs, in ns, to copy this much out and back, or back only.
  int64_t cost(int64_t size, bool is_there) const {
    double ns_per_byte = in_.ns_per_byte + (is_there ? 0 : out_.ns_per_byte);
    return LATENCY_NS + static_cast<int64_t>(ns_per_byte * static_cast<double>(size));
  }

  void released(int64_t place, int64_t size) {
    nbytes -= size;
    refused_ = INT64_MAX;
    release(place, size);
  }

 protected:
  // The bytes of a storage.
  virtual int64_t size_of(Storage* storage) const = 0;
  // Copies a storage's content to a new place. Returns nullopt if there is no room. event: set if the program does not wait yet; null:
  // it waits.
  virtual std::optional<int64_t> write(Storage* storage, int64_t size, std::shared_ptr<void>* event) = 0;
  // Returns new memory for a storage that has been emptied, with the content. event: as in `write`; then returns null if there is no
  // memory.
  virtual StorageRef read(int64_t place, int64_t size, Storage* emptied, std::shared_ptr<void>* event) = 0;
  virtual void move(Storage* emptied, Storage* filled) = 0;
  virtual void release(int64_t place, int64_t size) = 0;
  // Has the program wait for an event, now.
  virtual void await(void* /*event*/) {}
  // Called when the program waits so long for a copy that was, or could have been, ordered ahead.
  virtual void waits(int64_t /*ns*/) {}
  // Returns whether the next copy in this direction is over when the function that makes it returns.
  virtual bool is_timed(const Traffic&) const { return true; }
  // Has done what else would take time then. wanted: bytes of the place that it takes; 0 if it takes none.
  virtual void begin_timing(int64_t /*wanted*/) {}

 private:
  static constexpr int64_t LATENCY_NS = 20'000;  // of a copy, however small
  static constexpr int64_t LEAST_TIMED = 1 << 20;  // bytes after which the time for each is known
  static constexpr int64_t ENOUGH_TIMED = 3;  // copies of at least so many, over a link

  // ns: 0 if it has not been timed.
  void count(Traffic& way, int64_t size, int64_t ns) const {
    way.copies++;
    way.nbytes += size;
    if (ns == 0 || modelled_) return;
    if (overlaps) {  // a link is as fast as its fastest copy: the others have waited, the first one longest
      if (size < LEAST_TIMED) return;
      way.least_ns = std::min(way.least_ns, static_cast<double>(ns) / static_cast<double>(size));
      if (++way.timed_copies >= ENOUGH_TIMED) way.ns_per_byte = way.least_ns;
      return;
    }
    way.timed_bytes += size;
    way.timed_ns += ns;
    if (way.timed_bytes >= LEAST_TIMED)
      way.ns_per_byte = static_cast<double>(way.timed_ns) / static_cast<double>(way.timed_bytes);
  }

  void ordered(Traffic& way, HostCopy& copy, std::shared_ptr<void> event, int64_t clock, bool ahead) {
    if (!overlaps) return;
    way.until = std::max(way.until, clock + waited_) + static_cast<int64_t>(way.ns_per_byte * static_cast<double>(copy.nbytes));
    if (!ahead) return wait_until(way.until, clock);
    way.ahead++;
    copy.over = way.until;
    copy.event = std::move(event);
  }
  void wait_until(int64_t when, int64_t clock) {
    int64_t ns = when - clock - waited_;
    if (ns <= 0) return;
    waited_ += ns;
    waits(ns);
  }

  const bool modelled_;  // costs stay as they were in the beginning
  Traffic out_, in_;
  int64_t waited_ = 0;  // ns
  int64_t refused_ = INT64_MAX;  // no place for this many bytes has been found since one was given back
};

HostCopy::~HostCopy() {
  tier->let_go(*this);
  if (brought) debts->brought_bytes += brought_bytes;
  brought.reset();
  tier->released(place, nbytes);
}

}  // namespace dtrrun
