// Only counts operators: their kernels run without the GIL, and what they make has no version, signature or recipe. So an operator
// takes little longer than without dtrrun.
//
// While memory is ample, this is done for all operators. `Interposer::count_only` decides at the end of a step whether the next one
// is counted: without a budget always, with one if no step so far has taken a large part of it. The bytes of a new storage are
// known by its vtable (storages.h) until it dies. Code that needs its version gets a constant (`Describer::known_or_adopted`).
// Counting ends within a step (`Recipes::end_counting`) before memory is not ample any more. What there is then has to stay: so little
// of the budget that the step still has most of it. Since nothing has been evicted by then, nothing has ever to be recomputed from
// what operators have written to meanwhile.
//
// Inside a tight budget, it is done for operators of backward passes that make little (`Interposer::may_count_backward`). Most of what
// a backward pass makes is used once, soon, and never evicted. These operators read what is in memory, and write to nothing that has
// a version, except a workspace that nothing reads again, so no recipe depends on what they do. What they make has to stay, so it may
// take a small part of the budget at any time (`Census::little`); what does not fit is handled in full. What they read is not locked:
// nothing is evicted while one runs.
#pragma once

#include <pthread.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <thread>

#include "bodies.h"
#include "counted_kernel.h"
#include "device.h"
#include "operator_info.h"
#include "replays.h"
#include "shortage.h"
#include "silence.h"
#include "stopwatch.h"
#include "storages.h"

namespace dtrrun {

// What the session that is on does for an operator that is only counted. These take the GIL. (interposer.cpp)
void collect_dead();
void end_counting();
void tick(int64_t now, Stopwatch& watch);
void meet_results(const Arrival& arrival);

class Counting {
 public:
  // The process-wide instance, never destroyed: a thread may be in it when its session ends.
  static Counting& own() {
    static Counting& counting = *new Counting;
    return counting;
  }

  // Counts an operator. Returns false if it has to be handled in full, which the caller does.
  bool run(Arrival& arrival, Stopwatch& watch) {
    OwnStorages& own = OwnStorages::present();
    bool all = own.census.counting.load(std::memory_order_acquire);
    if (!all && !(own.census.backward.load(std::memory_order_acquire) && is_in_backward())) return false;
    Known* known = find(&arrival.op.schema());
    if (known == nullptr || Body::innermost != nullptr) return false;
    const Terms& terms = *terms_.load(std::memory_order_acquire);
    Off off;
    bool timed = watch.is_on() || known->is_long.load(std::memory_order_relaxed);
    int64_t started = 0, ended = 0;
    {
      Inside inside(*this, /*counts=*/!all || terms.may_leave);
      bool is_late = all ? terms.may_leave && !own.census.counting : is_evicting_ != 0;
      if (is_late || !terms.is_here()) return false;
      if (!arrival.is_known({own, terms.device, /*in_memory=*/!all}) && !(all && known->lifts && is_filled(arrival, own, terms)))
        return false;
      started = timed ? now_ns() : 0;
      if (!(all ? run_kernel(arrival, *known, own.census, terms) : run_little(arrival, *known, own, terms))) return false;
      ended = timed ? now_ns() : 0;
    }
    known->calls.fetch_add(1, std::memory_order_relaxed);
    own.census.operators.fetch_add(1, std::memory_order_relaxed);
    if (known->makes) {
      if (!arrival.count_results(own)) meet_results(arrival);
      if (deaths.any()) collect_dead();
      if (own.census.note() > own.census.ample.load(std::memory_order_relaxed)) end_counting();
    }
    if (timed) add(*known, ended - started, watch);
    if (timed && ended > next_look_.load(std::memory_order_relaxed)) {
      next_look_.store(ended + Stopwatch::LOOK_NS, std::memory_order_relaxed);
      tick(ended, watch);
    }
    return true;
  }

  // Returns whether this thread is in a backward pass whose operators autograd does not record.
  static bool is_in_backward() { return !at::GradMode::is_enabled() && torch::autograd::get_current_graph_task_id() != -1; }

  // -- by threads that have the GIL --

  // Forgets all operators.
  void clear() {
    for (Known& one : known_) one.schema.store(nullptr, std::memory_order_relaxed);
    count_ = 0;
  }
  // Lets operators on this device be counted. may_leave: what they read may leave for the host once counting of all has ended.
  void allow(const Device& device, bool may_leave) {
    const Terms* now = terms_.load(std::memory_order_relaxed);
    if (now != nullptr && now->may_leave == may_leave && now->device.is_same(device)) return;
    terms_.store(new Terms{Device(device), may_leave}, std::memory_order_release);
  }
  // Called when counting has ended, and something may be evicted next. Waits for counted kernels of other threads, which have not
  // locked what they read.
  void wait() const {
    if (!is_any_inside()) return;
    WithoutGil released;
    while (is_any_inside()) std::this_thread::yield();
  }
  // Called around evictions. Between these two, no operator of a backward pass is only counted.
  void begin_evicting() {
    is_evicting_++;
    wait();
  }
  void end_evicting() { is_evicting_--; }
  // Returns whether another thread may be in a counted kernel that reads what something could evict.
  bool is_any_inside() const { return inside_ != Inside::depth; }
  // Forgets with which sizes operators of backward passes have made too much.
  void forget_large() {
    for (Known& one : known_)
      if (one.schema.load(std::memory_order_relaxed) != nullptr) one.forget_large();
  }
  // Lets an operator be counted, if it is of a kind that can be.
  void add(const void* schema, const OperatorInfo& info) {
    bool handled =
        info.native_calls != 0 && !info.composite && !info.foreign && !info.grows && info.handler != HandlerKind::OTHER;
    if (!handled || count_ == MOST || find(schema) != nullptr) return;
    Known& one = *place_of(schema);
    one.views = info.handler == HandlerKind::VIEW || info.handler == HandlerKind::NO_TENSORS;
    one.lifts = static_cast<const c10::FunctionSchema*>(schema)->name() == "aten::lift_fresh";
    one.makes = one.lifts || (!one.views && info.makes_tensors);
    bool is_function = !info.random && !info.updates, in_place = info.mutates == std::vector<size_t>{0};
    one.repeatable = is_function && info.mutates.empty();
    one.in_place = is_function && in_place;
    one.stops = one.repeatable || (is_function && info.allocates_first && (in_place || info.writes_beside));
    one.forget_large();
    one.is_long = false;
    one.calls = 0;
    one.schema.store(schema, std::memory_order_release);
    count_++;
  }
  // Returns how often an operator has been counted since the last call.
  int64_t calls(const void* schema) {
    Known* known = find(schema);
    return known == nullptr ? 0 : known->calls.exchange(0, std::memory_order_relaxed);
  }
  // Return the time in counted operators, exact and estimated, since the last call.
  int64_t long_ns() { return long_ns_.exchange(0, std::memory_order_relaxed); }
  int64_t brief_ns() { return brief_ns_.exchange(0, std::memory_order_relaxed); }

 private:
  Counting() {
    // Other threads, which may be in a kernel, are not there in a child.
    pthread_atfork(nullptr, nullptr, [] { own().inside_ = own().is_evicting_ = 0; });
  }

  // What a session lets be counted: operators on its device. Never freed: another thread may read those of an ended session.
  struct Terms {
    Device device;
    bool may_leave;
    // Returns whether this thread runs operators where the session counts them.
    bool is_here() const { return device.is_cpu() || (device.is_current() && device.on_main_stream()); }
  };

  // A thread that runs a counted kernel. counts: whether something may be evicted otherwise.
  class Inside {
   public:
    Inside(Counting& counting, bool counts) : counting_(counts ? &counting : nullptr) {
      if (counting_ == nullptr) return;
      counting_->inside_++;
      depth++;
    }
    ~Inside() {
      if (counting_ == nullptr) return;
      depth--;
      counting_->inside_--;
    }
    Inside(const Inside&) = delete;
    static inline thread_local int depth = 0;  // of this thread

   private:
    Counting* const counting_;
  };

  static constexpr size_t PLACES = 2048, MOST = 1024;
  // What an operator that can't be repeated makes takes at most so many times as its first tensor.
  static constexpr int64_t TIMES = 4;

  // What is known about an operator.
  struct Known {
    std::atomic<const void*> schema{nullptr};
    bool views = false, makes = false, repeatable = false;  // views: its kernel touches no memory
    bool in_place = false;  // it writes to its first tensor, and depends on nothing but its arguments
    bool stops = false;  // it can be stopped when it allocates, since it has written to nothing by then: as on a GPU
    bool lifts = false;  // its tensor may have just been made by `torch.tensor`
    std::atomic<bool> is_long{false};  // as the last call that was timed
    std::atomic<int64_t> calls{0};
    // Whether it has made too much in a backward pass, and with which sizes: a bit for each hash of these. Some other sizes have the same
    // bit, and are handled in full, too. An operator may be called with a hundred sizes. Last: rarely read.
    std::atomic<bool> has_large{false};
    std::array<std::atomic<uint64_t>, 8> large{};
    static size_t word_of(uint64_t hash) { return hash >> 61; }
    static uint64_t bit_of(uint64_t hash) { return uint64_t{1} << (hash >> 55 & 63); }
    bool is_large(Arrival& arrival) const {
      if (!has_large) return false;
      uint64_t hash = arrival.hash_of_sizes();
      return (large[word_of(hash)] & bit_of(hash)) != 0;
    }
    void add_large(Arrival& arrival) {
      uint64_t hash = arrival.hash_of_sizes();
      large[word_of(hash)] |= bit_of(hash);
      has_large = true;
    }
    void forget_large() {
      for (auto& one : large) one = 0;
      has_large = false;
    }
  };

  Known* place_of(const void* schema) {
    size_t place = (reinterpret_cast<uintptr_t>(schema) >> 6) % PLACES;
    while (true) {
      const void* there = known_[place].schema.load(std::memory_order_acquire);
      if (there == nullptr || there == schema) return &known_[place];
      place = (place + 1) % PLACES;
    }
  }
  Known* find(const void* schema) {
    Known* found = place_of(schema);
    return found->schema.load(std::memory_order_relaxed) == nullptr ? nullptr : found;
  }

  // Returns whether an operator has got what `torch.tensor` has just made, which it counts.
  static bool is_filled(Arrival& arrival, OwnStorages& own, const Terms& terms) {
    const at::Tensor* made = arrival.first();
    return terms.device.is_cpu() && made != nullptr && count_filled(*made, own);
  }

  // Runs the kernel of an operator. Returns false, with nothing done, if what it makes takes more room than there is, or might: in full,
  // room is made first.
  static bool run_kernel(Arrival& arrival, const Known& known, const Census& census, const Terms& terms) {
    if (known.views) {
      arrival.run();
      return true;
    }
    auto run = [&] { Shortage::Kernel::run(/*locked=*/!terms.may_leave, /*own=*/true, [&] { arrival.run(); }); };
    int64_t ample = census.ample.load(std::memory_order_relaxed), room = ample - census.resident();
    if (!known.makes || ample == UNLIMITED) {
      run();
      return true;
    }
    if (!known.repeatable) {
      const at::Tensor* first = arrival.first();
      if (first == nullptr || !first->defined() || static_cast<int64_t>(first->nbytes()) > room / TIMES) return false;
      run();
      return true;
    }
    CountedKernel kernel(room);
    return is_done(arrival, kernel, run);
  }

  // Runs a kernel that may be stopped. Returns false, with its arguments as before, if it has been: it is going to run again, and
  // warns then.
  template <class Run>
  static bool is_done(Arrival& arrival, const CountedKernel& kernel, const Run& run) {
    HeldWarnings warnings;
    arrival.keep();
    try {
      run();
      if (!kernel.has_refused()) {
        arrival.drop();
        return true;
      }
    } catch (const c10::OutOfMemoryError&) {  // on a GPU, others may have its memory
    } catch (...) {
      if (!kernel.has_refused() || is_no_error()) throw;
    }
    warnings.drop();
    arrival.restore();
    return false;
  }

  // The same, for one of a backward pass, inside a budget.
  static bool run_little(Arrival& arrival, Known& known, const OwnStorages& own, const Terms& terms) {
    if (!known.in_place && !known.stops) return false;
    auto run = [&] { Shortage::Kernel::run(/*locked=*/false, /*own=*/true, [&] { arrival.run(); }); };
    if (known.views) {
      arrival.run();
      return true;
    }
    int64_t room = own.census.room_for_little();
    const at::Tensor* first = arrival.first();
    int64_t nbytes = first == nullptr || !first->defined() ? 0 : static_cast<int64_t>(first->nbytes());
    if (known.in_place) {
      if (nbytes == 0 || !first->unsafeGetTensorImpl()->has_storage()) return false;
      if (!own.counts(first->unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl())) return false;
      if (terms.device.is_cpu()) {  // it can't be stopped, and is never refused memory
        if (nbytes > room / TIMES) return false;
        run();
        return true;
      }
    } else if (nbytes > room) {
      return false;
    }
    if (!known.stops || known.is_large(arrival)) return false;
    CountedKernel::Exact kernel(room, own.mask());
    bool done = is_done(arrival, kernel, run);
    if (!done) known.add_large(arrival);
    return done;
  }

  void add(Known& known, int64_t ns, Stopwatch& watch) {
    watch.leave_out(ns);
    if (known.is_long.load(std::memory_order_relaxed))
      long_ns_.fetch_add(ns, std::memory_order_relaxed);
    else
      brief_ns_.fetch_add(Stopwatch::for_all(ns), std::memory_order_relaxed);
    known.is_long.store(ns >= BRIEF_NS, std::memory_order_relaxed);
  }

  std::array<Known, PLACES> known_;
  size_t count_ = 0;
  std::atomic<const Terms*> terms_{nullptr};
  std::atomic<int> inside_{0};  // threads in a counted kernel, if something may be evicted otherwise
  std::atomic<int> is_evicting_{0};
  std::atomic<int64_t> next_look_{0}, long_ns_{0}, brief_ns_{0};
};

}  // namespace dtrrun
