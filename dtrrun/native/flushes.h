// Keeps a GPU's caching allocator from flushing: evicts for a request for which it has no cached block, and may not map one.
//
// If the pages that a flush would return are enough for the request, the allocator may flush where that is far cheaper. Otherwise
// it would flush and refuse the request, so room is made at once (docs/design/cuda.md, "Flushes"). Python is asked only where the
// allocator does not tell of its blocks.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "backend.h"
#include "turns.h"
#include "windows.h"

namespace dtrrun {

class Flushes {
 public:
  // Of one of a session's devices, by its place. gpu: a `Gpu`. accounts, pools: its own. follow: called where its blocks are not
  // followed; returns whether they are now.
  Flushes(py::object ledger, py::object lock, py::object gpu, py::object accounts, py::object pools, py::object follow,
          int64_t place)
      : ledger(std::move(ledger)), lock(std::move(lock)), gpu(std::move(gpu)), accounts(std::move(accounts)),
        pools(std::move(pools)), follow(std::move(follow)), place_(place) {}

  py::object ledger, lock, gpu, accounts, pools, follow;
  int64_t searches = 0;  // requests for which room was made
  int64_t processor_ns = 0;  // what that has taken the processor
  int64_t avoided = 0;  // of these, ones for which something was evicted
  int64_t avoiding_ns = 0;  // what that has taken the host inside the program's own operators

  // Attends to the requests on these devices from now on.
  static void listen(std::vector<py::object> devices) {
    listening() = std::move(devices);
    Shortage::own().listen_before_flush(listening().empty() ? nullptr : &before_flush);
  }

  // Returns what a request counts against the cap if it has to be mapped (`get_allocation_size`).
  static int64_t growth_for(int64_t nbytes) {
    if (nbytes >= LARGE) return (nbytes + SMALL_UNIT - 1) / SMALL_UNIT * SMALL_UNIT;
    return nbytes <= static_cast<int64_t>(DeviceBlocks::SMALL) ? SMALL_UNIT : SEGMENT;
  }
  // Returns the time that so many flushes cost in which `free` bytes in all are unmapped, and `wanted` bytes are mapped again. A
  // flush between queued kernels adds this much to them (`python -m tests.bench.gpu_short.calls`).
  static int64_t flush_ns(int64_t free, int64_t wanted, int64_t flushes) {
    return flushes * STALL_NS + (free * UNMAP_NS + wanted * MAP_NS) / SEGMENT;
  }

  // Returns what a window of blocks may cost, so that a flush is not far cheaper.
  static int64_t most_ns(int64_t free, int64_t wanted) { return REST * flush_ns(free, wanted, 1); }

  // As `dtrrun::evict_window`.
  bool evict_window(int64_t wanted, int64_t at_most) {
    bool done = false;
    beneath([&] { done = evict(wanted, at_most); });
    return done;
  }

  // Makes room for a request if it is one for this device, whose allocator would flush.
  void avoid(int64_t nbytes) {
    Core& core = this->core();
    const Device* device = backend_of(core).device();
    if (device == nullptr || !device->is_bound() || device->current_place() != place_) return;
    Ref limit = attribute(accounts.ptr(), "cap");
    if (limit.get() == Py_None || core.ledger.paused != 0 || !device->on_main_stream(place_)) return;
    if (truth(pools.ptr(), "inside")) return;
    int64_t cap = as_number(limit.get()), growth = growth_for(nbytes);
    if (nbytes > cap) return;
    int64_t reserved = follows() ? static_cast<int64_t>(DeviceBlocks::own().reserved_bytes()) : statistic("reserved");
    if (reserved + growth <= cap) return;  // it maps more
    int64_t started = now_ns(), used = used_ns(), evictions = core.eviction.evictions;
    {
      Held turn(*bound<TurnLock>(lock.ptr()));
      Ledger::Using now(core.ledger, place_);
      core.ledger.collect_dead();
      // If that is much, another of the allocator's pools has it.
      int64_t unused = std::max<int64_t>(core.ledger.limit - core.ledger.resident_bytes, 0);
      if (unused <= cap / CROWDED_SHARE) unused_.push_back(unused);
      beneath([&] { make_room(nbytes, reserved, growth, cap); });
    }
    int64_t took = now_ns() - started;
    searches++;
    processor_ns += used_ns() - used;
    avoided += core.eviction.evictions > evictions;
    if (core.ledger.replaying == 0) avoiding_ns += took;
  }

  // Returns how many bytes more tensors could have taken at each search since the last call, unless these were many.
  std::vector<int64_t> take_unused() { return std::exchange(unused_, {}); }

 private:
  static constexpr int64_t SEGMENT = 20 << 20;  // the allocator's page
  static constexpr int64_t SMALL_UNIT = 2 << 20;  // for requests of up to 1 MiB, which have a pool of their own
  static constexpr int64_t LARGE = 10 << 20;  // from here on, requests are rounded up to SMALL_UNIT
  // For one SEGMENT, with create, access and release (on an H200).
  static constexpr int64_t UNMAP_NS = 60'000, MAP_NS = 65'000;
  static constexpr int64_t STALL_NS = 2'500'000;  // the GPU runs out of work while the host waits for it, unmaps and maps
  // A flush must be this much cheaper: it moves blocks, so the next steps differ, and flush again.
  static constexpr int64_t REST = 3;
  static constexpr int64_t CROWDED_SHARE = 16;  // of the cap: no more is kept free because of searches
  static constexpr int ROUNDS = 4;  // of evictions, until the pages that they leave free are enough

  static std::vector<py::object>& listening() {
    static std::vector<py::object>& devices = *new std::vector<py::object>();
    return devices;
  }
  static void before_flush(size_t nbytes) {
    for (size_t place = 0; place < listening().size(); place++) {
      py::object one = listening()[place];
      bound<Flushes>(one.ptr())->avoid(static_cast<int64_t>(nbytes));
    }
  }

  // Returns what this thread has taken the processor so far, for benches on machines that have other work to do.
  static int64_t used_ns() {
    timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return now.tv_sec * 1'000'000'000ll + now.tv_nsec;
  }

  Core& core() const { return core_of(ledger.ptr()); }
  template <class Run>
  void beneath(Run run) {
    core().backend->beneath([](void* given) { (*static_cast<Run*>(given))(); }, &run);
  }

  bool follows() const {
    return (place_ == 0 && DeviceBlocks::own().follows()) || checked(PyObject_CallNoArgs(follow.ptr())).get() == Py_True;
  }
  int64_t statistic(const char* name) const { return attribute_number(call(gpu, "statistics").get(), name); }
  // Returns how much the allocator would return to the driver if it flushed; roughly, where blocks are not followed.
  int64_t returnable() const {
    return follows() ? static_cast<int64_t>(DeviceBlocks::own().returnable_bytes())
                     : statistic("reserved") - statistic("allocated");
  }
  bool evict(int64_t wanted, int64_t at_most) {
    if (follows()) {
      return dtrrun::evict_window(core(), wanted, at_most, [&](const auto& function) {
        DeviceBlocks::own().each_serving(static_cast<size_t>(wanted), function);
      });
    }
    using Segment = std::vector<std::tuple<int64_t, int64_t, bool>>;  // address, bytes, is free
    auto segments = py::cast<std::vector<Segment>>(object_in(call(gpu, "segments", wanted)));
    return dtrrun::evict_window(core(), wanted, at_most, [&](const auto& function) {
      for (const Segment& segment : segments) {
        for (auto [address, nbytes, free] : segment)
          function(DeviceBlock{static_cast<uintptr_t>(address), static_cast<size_t>(nbytes), free});
        function(DeviceBlock{0, 0, false});
      }
    });
  }
  bool release_anywhere(int64_t nbytes) {
    return core().eviction.evict_to(std::max<int64_t>(core().ledger.resident_bytes - nbytes, 0));
  }

  // growth: what the request counts against the cap. If more has to be evicted for a flush to do, that costs little: what is
  // cheapest, wherever it is.
  void make_room(int64_t nbytes, int64_t reserved, int64_t growth, int64_t cap) {
    if (evict(nbytes, most_ns(0, growth))) return;  // cheaper than any flush
    int64_t free = returnable(), lacking = reserved - free + growth - cap;
    if (evict(nbytes, most_ns(free + std::max<int64_t>(lacking, 0), growth)) || lacking <= 0) return;
    for (int round = 0; round < ROUNDS && release_anywhere(lacking); round++) {
      lacking = reserved - returnable() + growth - cap;
      if (lacking <= 0) return;
    }
    if (!evict(nbytes, -1)) release_anywhere(nbytes);
  }

  const int64_t place_;
  std::vector<int64_t> unused_;  // see `take_unused`
};

}  // namespace dtrrun
