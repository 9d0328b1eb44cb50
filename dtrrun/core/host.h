// The host tier: memory outside the budget, to which versions can be copied.
//
// What has no recipe (weights, gradients, an optimizer's state) can't be computed again, but it can be copied out and back. What has
// one may be faster to copy. A version has two facts: it is resident, and it has a copy on the host. Resident without a copy: as always. Neither: dropped, to be computed
// again. Only a copy: it has left. Both: it can leave for nothing, until it is written to, which drops the copy.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>

#include "policy/clock.h"
#include "storage.h"

namespace dtrrun {

class HostTier;

// The copy of one version. Gives its place back when it is freed.
struct HostCopy {
  std::shared_ptr<HostTier> tier;
  int64_t place;   // as the tier numbers places
  int64_t nbytes;  // of the storage; a version's bytes are rounded
  int64_t last_access = 0;  // the version's, when it left

  HostCopy(std::shared_ptr<HostTier> tier, int64_t place, int64_t nbytes) : tier(std::move(tier)), place(place), nbytes(nbytes) {}
  HostCopy(const HostCopy&) = delete;
  inline ~HostCopy();
};

class HostTier : public std::enable_shared_from_this<HostTier> {
 public:
  // most_bytes: that copies may take together. Times in ns for each byte are those to begin with.
  HostTier(int64_t most_bytes, double ns_out, double ns_in, bool modelled)
      : most_bytes(most_bytes), modelled_(modelled), out_{ns_out}, in_{ns_in} {}
  virtual ~HostTier() = default;
  HostTier(const HostTier&) = delete;

  const int64_t most_bytes;
  int64_t nbytes = 0, peak_bytes = 0;  // of the copies, now and at most

  // What has been copied in one direction.
  struct Traffic {
    double ns_per_byte;
    int64_t copies = 0, nbytes = 0;
    int64_t timed_bytes = 0, timed_ns = 0;
  };
  const Traffic& out() const { return out_; }
  const Traffic& in() const { return in_; }

  // Returns whether there may be a place for this many bytes.
  bool has_room(int64_t wanted) const { return nbytes + wanted <= most_bytes && wanted < refused_; }

  // The same, if copies that are not needed are given up.
  bool may_have_room(int64_t wanted) const { return wanted <= most_bytes && wanted < refused_; }

  // Copies a storage out. Returns null if there is no room for it.
  std::unique_ptr<HostCopy> send(Storage* storage) {
    int64_t wanted = size_of(storage), began = now_ns();
    if (!has_room(wanted)) return nullptr;
    bool timed = is_timed(out_);
    std::optional<int64_t> place = write(storage, wanted);
    if (!place) {
      refused_ = wanted;
      return nullptr;
    }
    count(out_, wanted, timed ? now_ns() - began : 0);
    nbytes += wanted;
    peak_bytes = std::max(peak_bytes, nbytes);
    return std::make_unique<HostCopy>(shared_from_this(), *place, wanted);
  }
  // Copies the content back into a storage that has been emptied.
  void bring(const HostCopy& copy, Storage* emptied) {
    int64_t began = now_ns();
    bool timed = is_timed(in_);
    read(copy.place, copy.nbytes, emptied);
    count(in_, copy.nbytes, timed ? now_ns() - began : 0);
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
  // Copies a storage's content to a new place. Returns nullopt if there is no room.
  virtual std::optional<int64_t> write(Storage* storage, int64_t size) = 0;
  virtual void read(int64_t place, int64_t size, Storage* emptied) = 0;
  virtual void release(int64_t place, int64_t size) = 0;
  // Returns whether the next copy in this direction is over when the function that makes it returns.
  virtual bool is_timed(const Traffic&) const { return true; }

 private:
  static constexpr int64_t LATENCY_NS = 20'000;    // of a copy, however small
  static constexpr int64_t LEAST_TIMED = 1 << 20;  // bytes after which the time for each is known

  // ns: 0 if it has not been timed.
  void count(Traffic& way, int64_t size, int64_t ns) const {
    way.copies++;
    way.nbytes += size;
    if (ns == 0) return;
    way.timed_bytes += size;
    way.timed_ns += ns;
    if (!modelled_ && way.timed_bytes >= LEAST_TIMED)
      way.ns_per_byte = static_cast<double>(way.timed_ns) / static_cast<double>(way.timed_bytes);
  }

  const bool modelled_;  // costs stay as they were in the beginning
  Traffic out_, in_;
  int64_t refused_ = INT64_MAX;  // no place for this many bytes has been found since one was given back
};

HostCopy::~HostCopy() { tier->released(place, nbytes); }

}  // namespace dtrrun
