// Handles the operators of one session.
//
// `in_full` lets the core admit and finish them (`core/operator.h`), and asks Python what C++ does not know (`runtime/dispatch`). `view`
// does the little that a view needs, and `update_lists` what in-place operators on lists need. Operators without tensors just run.
#pragma once

#include <memory>

#include "admission.h"
#include "bodies.h"
#include "counting.h"
#include "describe.h"
#include "device.h"
#include "lists.h"
#include "observed.h"
#include "operator_table.h"
#include "pytorch.h"
#include "recent_tensors.h"
#include "record.h"
#include "run_kernel.h"
#include "split_lists.h"
#include "stopwatch.h"
#include "turns.h"
#include "way_in.h"

namespace dtrrun {

// One session. Callers hold the GIL.
class Interposer final : public Turns {
 public:
  Interposer(PyObject* python, PyObject* classes, const char* device)
      : device(device, attribute(python, "model"), attribute(attribute(python, "callbacks").get(), "device").get() != Py_None),
        python_(Ref::copy(python)), callbacks_(attribute(python, "callbacks")), ledger_(attribute(callbacks_.get(), "ledger")),
        call_observer_(callbacks_.get()), reasons_(attribute(callbacks_.get(), "reasons")),
        composites_(attribute(callbacks_.get(), "composites")),
        away_(attribute(attribute(callbacks_.get(), "turns").get(), "away")), kernels_(attribute(callbacks_.get(), "kernels")),
        versions_(ledger_.get(), as_number(attribute(python, "mask").get())), recent(versions_), core_(versions_.core),
        ledger(core_.ledger), operators_(python), lock_(*bound<TurnLock>(attribute(callbacks_.get(), "lock").get())),
        replays_(python, operators_, this->device), admission_(callbacks_.get(), lock_, versions_), lists_(versions_),
        first_calls_(python, attribute(callbacks_.get(), "signatures").get(), versions_),
        describer_(callbacks_.get(), this->device, versions_, first_calls_),
        recording_(python, callbacks_.get(), this->device, versions_), measuring_(python, this->device),
        kernel_(python, callbacks_.get(), this->device, versions_, first_calls_, measuring_, *this, lock_),
        observation_(callbacks_.get(), versions_, first_calls_), any_reason_(type_of(classes, "Reasons"), "any"),
        home_(type_of(classes, "Callbacks"), "home_thread"), next_tick_(type_of(classes, "Callbacks"), "next_tick"),
        waiting_(type_of(classes, "Callbacks"), "waiting") {
    Counting::own().clear();
    own_.round_with(as_number(attribute(python, "mask").get()));
    ledger.census = &own_.census;
    ledger.tell_census();
    backend_of(core_).connect(SessionBackend::Native{replays_, this->device, callbacks_.get(), next_tick_, waiting_,
                                                     as_number(attribute(python, "mask").get())});
  }
  ~Interposer() {
    ledger.settle();
    ledger.census = nullptr;
    own_.leave();
    backend_of(core_).disconnect();
  }

  void handle(Arrival& arrival, const Gil& gil, Stopwatch& watch) {
    if (is_without_memory(arrival) || !is_used_by(arrival) || !(device.is_bound() || wake(arrival))) {
      Off off;
      Gil::Released released(gil);
      Stopwatch::Pause pause(watch);
      arrival.run();
      return;
    }
    OperatorInfo& info = operators_.of(arrival.op);
    Body* body = Body::innermost;
    if (info.composite || (body != nullptr && info.foreign)) {
      take_apart(info, arrival, gil, watch);
      return;
    }
    if (info.splits && body == nullptr && ledger.tier) {
      Stopwatch::Pause pause(watch);  // the parts arrive
      if (split_lists_.run(arrival)) return;
    }
    Off off;
    if (body != nullptr) {
      ledger.collect_dead();
      body->calls(arrival, versions_);
      {
        Gil::Released released(gil);
        Stopwatch::Pause pause(watch);
        Shortage::Kernel::run(/*locked=*/true, /*own=*/true, [&] { arrival.run(); });
      }
      body->made(arrival);
      return;
    }
    if (info.handler == HandlerKind::NO_TENSORS) {  // profiler markers, which every optimizer step has
      info.native_calls++;
      Gil::Released released(gil);
      Stopwatch::Pause pause(watch);
      arrival.run();
      return;
    }
    ActiveThreadGuard visit(*this);
    join();
    in_turn(info, arrival, gil, watch);
    tick_after(left_, watch);
  }

  // Called between two steps: only counts operators from now on (counting.h), if memory is ample and nobody has to see them.
  // share: memory is ample while tensors take at most one in so many bytes of the limit. backward: otherwise, whether operators of
  // backward passes may be counted that make little.
  void count_only(int64_t share, bool backward) {
    ledger.settle();
    int64_t ample = ledger.budget_bytes < 0 ? UNLIMITED : ledger.limit / share;
    bool is_ample = !ledger.pressure && ledger.paused == 0 && ledger.peak_bytes <= ample;
    bool is_seen = versions_.observers.any() || versions_.fingerprints.are_taken() || call_observer_.is_on() || recent.is_on;
    bool is_possible = device.is_bound() && !device.is_modelled() && !device.are_several() && !is_seen && !is_careful();
    bool in_part = !is_ample && backward && may_count_backward();
    bool counts = is_possible && (is_ample || in_part);
    if (!counts || !is_ample) core_.recipes.end_counting();
    if (!counts) return;
    operators_.each([](const void* schema, const OperatorInfo& info) { Counting::own().add(schema, info); });
    Counting::own().allow(device, /*may_leave=*/ledger.tier != nullptr);
    own_.census.ample = is_ample ? ample : ledger.limit;
    own_.census.share = share;
    own_.census.little = ledger.limit / LITTLE;
    ledger.tell_census();
    own_.census.counting = is_ample;
    own_.census.backward = !is_ample;
  }
  // Called by operators that are only counted, which have no turn.
  void end_counting() {
    Turn turn(lock_, shared_ || is_careful());
    core_.recipes.end_counting();
  }
  void collect_dead() {
    Turn turn(lock_, shared_ || is_careful());
    ledger.collect_dead();
  }
  // Called with what an operator that was only counted has made: some of it is not plain.
  void meet_results(const Arrival& arrival) {
    Off off;
    Turn turn(lock_, shared_ || is_careful());
    for (const at::Tensor& tensor : arrival.tensors())
      if (!dtrrun::is_known(tensor, {own_, device})) describer_.meet(tensor);
  }

  // The session has begun to use this GPU, too, if it is not the first.
  void bind(c10::DeviceIndex index) {
    device.bind(index);
    if (device.are_several()) core_.recipes.end_counting();
  }

  // Returns true if a tensor's memory is, as far as is known, an initialised constant of the session.
  bool is_updated_constant(const at::Tensor& tensor) {
    if (!device.has(tensor.device())) return false;
    ledger.some_died();  // reports deaths to the table
    const Version* found = versions_.of(tensor);
    return found == nullptr || (found->constant() && found->pin != pins::UNINITIALISED);
  }
  // Keeps a copy of a constant that is about to change, for the recipes that read it. Returns false if that is not possible.
  bool keep_copy_of(const at::Tensor& constant) {
    Off off;
    Version* one = describer_.known_or_adopted(constant);
    if (one == nullptr) return false;
    if (one->copy) return true;
    return !one->escaped && one->resident && ledger.paused == 0 && core_.copies.make(one);
  }

  // From now on, several threads may have operators in progress. None may be in an operator when this is called.
  void share() { shared_ = true; }

  // Forgets what is known about operators, since one of PyTorch's own has got another kernel.
  void relearn() {
    operators_.relearn();
    core_.recipes.end_counting();
    Counting::own().clear();
  }

  void forget() {
    describer_.signatures.clear();
    lists_.forget_kinds();
    observation_.identities.clear();
    replays_.forget();
  }

  // Called when code that is not an operator touches the memory of an evicted storage, and waits for it (`Access.touched`).
  // words: that code's `Words`. Returns false if the storage does not belong to the session.
  bool touched(const Placeholders::Claim& claim, const std::vector<uintptr_t>& words) {
    Version* found = versions_.at(claim.storage);
    if (found == nullptr || !TensorVersions::has_storage(found)) return false;
    Ref kept = as_object(found);
    auto* outer = std::exchange(touched_, &claim);
    struct Ends {
      const Placeholders::Claim* outer;
      ~Ends() { touched_ = outer; }
    } ends{outer};
    Anchors anchors(versions_, words, claim.storage);
    checked(PyObject_CallMethod(python_.get(), "touched", "O", kept.get()));
    return Placeholders::own().is_memory(claim);
  }
  // Moves its memory to the address that this code touched. Returns false if the system has no memory.
  bool settle() {
    Version* found = touched_ == nullptr ? nullptr : versions_.at(touched_->storage);
    ImplRef storage = found == nullptr ? ImplRef() : TensorVersions::storage_of(found);
    if (!storage || is_empty(storage.get())) return false;
    return Placeholders::own().is_memory(*touched_) || Placeholders::own().make_memory(*touched_, storage.get());
  }

  // Enters those of these tensors, and of their gradients, that have only been counted.
  void adopt_counted(PyObject* tensors) {
    auto adopt = [&](const at::Tensor& one) {
      if (!one.defined() || !one.unsafeGetTensorImpl()->has_storage()) return;
      const c10::StorageImpl* storage = one.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
      if (own_.knows(storage) && OwnStorages::is_counted(storage)) describer_.known_or_adopted(one);
    };
    for (PyObject* one : Items(tensors)) {
      const at::Tensor& tensor = tensor_of(one);
      adopt(tensor);
      if (tensor.defined()) adopt(tensor.unsafeGetTensorImpl()->grad());
    }
  }
  // Returns true if these tensors stay in memory without a lock: operators are only counted, and nothing may be evicted.
  bool stay(PyObject* tensors) const {
    if (!ledger.counting() || ledger.tier) return false;
    for (PyObject* one : Items(tensors))
      if (!dtrrun::is_known(tensor_of(one), {own_, device})) return false;
    return true;
  }

  // `Access.pin`, for a gradient that is resident. Returns false if it must be handled in Python.
  bool pin_gradient(const at::Tensor& gradient) {
    if (ledger.counting() && dtrrun::is_known(gradient, {own_, device})) return true;  // nothing is evicted
    Off off;
    ActiveThreadGuard visit(*this);
    if (!is_plain(gradient) || !is_plain_kind(gradient, device) || !device.is_bound() || is_careful()) return false;
    if (versions_.observers.any()) return false;
    if (inside_ != 0) return false;  // a kernel has started its own backward pass
    join();
    if (is_careful()) return false;
    Turn turn(lock_, shared_);
    TurnScope inside(*this, turn);
    ledger.collect_dead();
    Version* found = versions_.of(gradient);
    if (found == nullptr && ledger.counts_backward() && dtrrun::is_known(gradient, {own_, device, /*in_memory=*/true})) {
      found = describer_.known_or_adopted(gradient);
      own_.stays(gradient.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl());
    }
    if (found == nullptr || !found->resident || found->needed_by) return false;
    core_.recipes.make_constant(found, pins::GRADIENT);
    found->last_access = ledger.clock;
    found->pin = pins::GRADIENT;
    return true;
  }

  Measuring& measuring() { return measuring_; }

  // Returns what would be recomputed from these constants, of all that there is, or of what is `RecentTensors::held`.
  VersionList needed_without(const std::unordered_set<const Version*>& leaving, int64_t from, bool all) {
    if (from == recent.count() && !all) return {};
    ledger.collect_dead();
    return computed_from(all ? ledger.versions.all() : recent.held(from), leaving);
  }

  Ref calls(int64_t OperatorInfo::* counter) {
    operators_.each([](const void* schema, OperatorInfo& info) { info.native_calls += Counting::own().calls(schema); });
    return operators_.calls(counter);
  }

  // Called when code of the program is about to run in the middle of an operator (`runtime/dispatch/turns.py`): this thread
  // gives up its turn until `rejoin`. Returns whether it had one without a lock, since no other thread used the session.
  bool leave() override {
    if (inside_ != PyThread_get_thread_ident()) return false;
    inside_ = 0;
    return true;
  }
  // Returns false if it must be called again, as another thread is about to join.
  bool rejoin() override {
    Ref reasons = attribute(reasons_.get(), "all");
    bool others = checked_truth(PySet_Contains(reasons.get(), checked(PyUnicode_FromString("threads")).get()));
    if (others && !shared_ && device.is_cpu()) return false;
    if (others || shared_) {
      for (TurnScope* scope = scope_; scope != nullptr; scope = scope->outer()) scope->turn().begin_sharing();
    } else {
      inside_ = PyThread_get_thread_ident();
    }
    return true;
  }

  // Returns true if another thread is in an operator without a lock.
  bool is_inside() const { return (inside_ != 0 && inside_ != PyThread_get_thread_ident()) || Counting::own().is_any_inside(); }

  Device device;
  void tick_after(int64_t now, Stopwatch& watch) {
    if (now <= next_look_) return;
    next_look_ = now + Stopwatch::LOOK_NS;
    Stopwatch::Pause pause(watch);  // it measures its own time
    if (now > next_tick_.number(callbacks_.get())) checked(PyObject_CallMethod(callbacks_.get(), "tick", nullptr));
  }

  // Time in the program's operators, and of our own: measured, or estimated from those that were timed. In the estimates, no
  // thread waits for a processor.
  int64_t operators_ns = 0, bookkeeping_ns = 0, brief_operators_ns = 0;
  void add_counted() {
    operators_ns += Counting::own().long_ns();
    brief_operators_ns += Counting::own().brief_ns();
  }
  int64_t own_ns() const { return Stopwatch::own_ns() - own_before_; }
  int64_t cold_ns() const { return Stopwatch::cold_ns() - cold_before_; }

  // Returns the active session, or null. Requires the GIL.
  static std::shared_ptr<Interposer>& current() {
    static auto& session = *new std::shared_ptr<Interposer>;  // never destroyed: Python may be finalized by then
    return session;
  }

 private:
  // Marks a thread whose operator is being handled. On a GPU, autograd's threads come and go, and usually one waits for another.
  // If two have operators at once, they take turns from then on.
  class ActiveThreadGuard {
   public:
    explicit ActiveThreadGuard(Interposer& interposer) : interposer_(interposer), counts_(!interposer.device.is_cpu()) {
      if (!counts_) return;
      own_ = PyThread_get_thread_ident();
      bool others = std::any_of(interposer.visitors_.begin(), interposer.visitors_.end(), [&](auto one) { return one != own_; });
      if (others && !interposer.shared_ && !interposer.is_careful())
        checked(PyObject_CallMethod(interposer.python_.get(), "overlap", nullptr));
      interposer.visitors_.push_back(own_);
    }
    ~ActiveThreadGuard() {
      if (!counts_) return;
      auto& all = interposer_.visitors_;
      if (auto own = std::find(all.rbegin(), all.rend(), own_); own != all.rend()) all.erase(std::next(own).base());
    }
    ActiveThreadGuard(const ActiveThreadGuard&) = delete;

   private:
    Interposer& interposer_;
    const bool counts_;
    unsigned long own_ = 0;
  };

  // Marks a thread that is in an operator. It takes no lock as long as there are no others.
  class TurnScope {
   public:
    TurnScope(Interposer& interposer, Turn& turn)
        : interposer_(interposer), turn_(turn), outer_(std::exchange(scope_, this)), before_(interposer.inside_),
          is_alone_(!turn.shared()) {
      if (is_alone_) interposer.inside_ = PyThread_get_thread_ident();
    }
    ~TurnScope() {
      if (scope_ == this) scope_ = outer_;
      if (is_alone_) interposer_.inside_ = turn_.shared() ? 0 : before_;
    }
    TurnScope(const TurnScope&) = delete;

    TurnScope* outer() const { return outer_; }
    Turn& turn() const { return turn_; }

   private:
    Interposer& interposer_;
    Turn& turn_;
    TurnScope* outer_;  // an operator in whose middle this one was called, by code of the program
    const unsigned long before_;
    const bool is_alone_;  // without a lock, at first
  };
  static inline thread_local TurnScope* scope_ = nullptr;  // this thread's innermost one

  // Returns whether operators of backward passes may be counted in the next step that make little, after what the last one was like:
  // it has evicted hardly anything that a backward pass had made, and could have evicted more at any time than they may make. What
  // programs do may change, and what an operator costs: so sometimes a step is handled in full.
  bool may_count_backward() {
    int64_t least = std::exchange(ledger.least_evictable, UNLIMITED), of_backward = std::exchange(ledger.evicted_of_backward, 0),
            evictions = core_.eviction.evictions - std::exchange(evictions_before_, core_.eviction.evictions);
    bool is_tight = least < ledger.limit / SPARE || of_backward * FEW > evictions;
    if (shared_ || is_tight || ledger.paused != 0 || steps_in_part_ == IN_PART) {
      steps_in_part_ = 0;
      Counting::own().forget_large();
      return false;
    }
    steps_in_part_++;
    return true;
  }
  static constexpr int64_t LITTLE = 64, SPARE = 16, FEW = 32;
  static constexpr int IN_PART = 15;  // steps, after which one is handled in full

  static bool checked_truth(int found) {
    if (found < 0) raise();
    return found != 0;
  }

  void in_turn(OperatorInfo& info, Arrival& arrival, const Gil& gil, Stopwatch& watch) {
    bool careful = is_careful();
    if (shared_ && !careful && info.handler == HandlerKind::VIEW && gil.held_before() && view_out_of_turn(info, arrival, watch))
      return;
    Turn turn(lock_, shared_ || careful);
    watch.leave_out(turn.waited_ns);
    TurnScope inside(*this, turn);
    if (device.are_several()) ledger.use(device.place_of(arrival.values(), arrival.count));
    try {
      if (is_careful() || !briefly(info, arrival, gil, watch))
        while (!in_full(info, arrival, gil, watch, turn)) continue;
    } catch (...) {
      turn.raise_interrupt();
      throw;
    }
    turn.raise_interrupt();
  }
  // Returns false if the operator has to take the longer way.
  bool briefly(OperatorInfo& info, Arrival& arrival, const Gil& gil, Stopwatch& watch) {
    if (info.handler == HandlerKind::VIEW && !versions_.observers.any()) return view(info, arrival, watch);
    return info.handler == HandlerKind::LISTS && update_lists(info, arrival, gil, watch);
  }

  // In inference mode, composites arrive whole. Runs one such that its parts arrive in turn.
  void take_apart(OperatorInfo& info, Arrival& arrival, const Gil& gil, Stopwatch& watch) {
    PyObject* kernel = PyDict_GetItemWithError(kernels_.get(), info.func.get());  // hashes it in Python
    if (kernel == nullptr && PyErr_Occurred()) raise();
    Stopwatch::Pause pause(watch);  // its parts arrive
    if (kernel == nullptr) {
      Gil::Released released(gil);
      arrival.run();
      return;
    }
    const IValue* values = arrival.values();
    auto [args, kwargs] = to_arguments(arrival.schema(), values, PyTuple_New,
                                       [&](size_t place) { return to_python(values[place], (*info.enumerations)[place]); });
    Ref result = checked(PyObject_Call(kernel, args.get(), kwargs.get()));
    arrival.set_results(results_from(arrival.schema(), result.get()));
  }

  // Returns true if a call computes only shapes, on meta tensors, as PyTorch's compiler does. Its numbers may be symbolic.
  static bool is_without_memory(Arrival& arrival) {
    auto decides = [](const at::Tensor& tensor) {
      return tensor.defined() && !tensor.unsafeGetTensorImpl()->is_wrapped_number();
    };
    if (const at::Tensor* first = arrival.first(); first != nullptr && decides(*first) && !first->is_meta()) return false;
    bool found = false;
    for (const IValue& value : c10::ArrayRef<IValue>(arrival.values(), arrival.count)) {
      if (value.isTensor()) {
        if (!decides(value.toTensor())) continue;
        if (!value.toTensor().is_meta()) return false;
        found = true;
      } else if (value.isTensorList()) {
        for (const IValue& item : value.toListRef())
          if (item.toTensor().defined() && !item.toTensor().is_meta()) return false;
        found = found || !value.toListRef().empty();
      } else if (value.isDevice()) {
        if (!value.toDevice().is_meta()) return false;
        found = true;
      }
    }
    return found;
  }

  bool is_used_by(Arrival& arrival) const {
    if (device.is_cpu()) return true;
    const at::Tensor* first = arrival.first();
    return (first != nullptr && Device::is_elsewhere(*first)) || device.is_used_by(arrival.values(), arrival.count);
  }

  // Returns true if something may change between the steps of an operator (`Reasons` in runtime/dispatch/callbacks.py).
  bool is_careful() { return any_reason_.is_true(reasons_.get()); }

  // A session on a GPU sleeps until an operator uses one. Returns false if this one does not.
  bool wake(Arrival& arrival) {
    Off off;
    const IValue* values = arrival.values();
    auto [args, kwargs] =
        to_arguments(arrival.schema(), values, PyTuple_New, [&](size_t place) { return python_value(values[place]); });
    return checked(PyObject_CallMethod(python_.get(), "wake", "OO", args.get(), kwargs ? kwargs.get() : Py_None)).get() ==
           Py_True;
  }

  // Lets the session know that this thread uses it, if it is the first beside the one that the session began with. Once there are
  // several, nothing is asked: a view may be called with the GIL and a PyTorch mutex, and Python code may release the GIL.
  void join() {
    if (shared_ || is_home()) return;
    thread_local std::weak_ptr<int> joined;
    if (joined.lock() == ticket_) return;
    checked(PyObject_CallMethod(python_.get(), "join", nullptr));
    joined = ticket_;
  }
  bool is_home() {
    PyObject* home = home_.get(callbacks_.get());
    if (home != known_home_.get()) {
      known_home_ = Ref::copy(home);
      home_thread_ = home == Py_None ? 0 : PyLong_AsUnsignedLong(home);
    }
    return home_thread_ == PyThread_get_thread_ident();
  }

  // -- views -----------------------------------------------------------------------------------------

  // Returns false if its storage is not in memory, or is new and does not fit.
  bool view(OperatorInfo& info, Arrival& arrival, Stopwatch& watch) {
    ledger.collect_dead();
    const at::Tensor* first = arrival.first();
    if (first == nullptr || !is_plain(*first)) return false;
    Version* found = versions_.of(*first);
    if (found == nullptr) {
      found = describer_.known_or_adopted(*first);
      if (ledger.resident_bytes > ledger.limit) return false;
    }
    if (found == nullptr || !(found->resident || info.untouching)) return false;
    found->last_access = ledger.clock;
    int64_t started = watch.is_on() ? now_ns() : 0;
    arrival.run();  // too short to release the GIL for
    if (watch.is_on()) add_brief(now_ns() - started, watch);
    ledger.age++;
    info.native_calls++;
    return true;
  }

  // `view`, without waiting for a turn and without recording anything. The caller holds the GIL, as when it asks a view for its
  // `grad_fn`, and may hold a PyTorch mutex, too. Waiting for a turn would release the GIL, as may any Python code, to a thread
  // that waits for that mutex while it holds the GIL.
  bool view_out_of_turn(OperatorInfo& info, Arrival& arrival, Stopwatch& watch) {
    const at::Tensor* first = arrival.first();
    if (first == nullptr || !is_plain(*first)) return false;
    ledger.some_died();  // reports deaths to the table
    const Version* found = versions_.of(*first);
    if (found == nullptr || !(found->resident || info.untouching)) return false;
    {
      Stopwatch::Pause pause(watch);
      arrival.run();
    }
    info.native_calls++;
    return true;
  }

  // -- lists -----------------------------------------------------------------------------------------

  bool update_lists(OperatorInfo& info, Arrival& arrival, const Gil& gil, Stopwatch& watch) {
    ledger.in_backward = Counting::is_in_backward();
    if (!lists_.prepare(info, arrival.schema(), arrival.values())) return false;
    Observed observed(observation_, info, arrival, lists_.prepared(), nullptr);
    observed.runs(true);
    int64_t started = now_ns(), ended = 0;
    try {
      {
        Gil::Released released(gil);
        Shortage::Kernel::run(/*locked=*/false, /*own=*/true, [&] { arrival.run(); });
      }
      ended = now_ns();
      lists_.finish(ended - started);
      observed.finished();
      call_observer_.called();
    } catch (...) {
      lists_.fail();
      if (!device.is_cpu()) can_retry(python_.get(), nullptr);
      throw;
    }
    operators_ns += ended - started;
    watch.leave_out(ended - started);
    info.native_calls++;
    info.list_calls++;
    left_ = ended;
    return true;
  }

  // A list operator has run, on the longer way. On a GPU, its first calls are measured there.
  void learn_list(const ListUpdates::Kind& kind, PyObject* signature) {
    if (device.is_cpu() || as_signature(signature)->figures.calls >= Signature::SETTLED) lists_.learn(kind, signature);
  }

  // ns: the time of a brief operator's kernel, which stands for others.
  void add_brief(int64_t ns, Stopwatch& watch) {
    watch.leave_out(ns);
    brief_operators_ns += Stopwatch::for_all(ns);
  }

  // -- operators in full -----------------------------------------------------------------------------

  // Returns false if versions of its tensors have changed meanwhile, and it has to be described again.
  bool in_full(OperatorInfo& info, Arrival& arrival, const Gil& gil, Stopwatch& watch, Turn& turn) {
    ledger.collect_dead();
    GivenStorages given(*this, info, arrival);
    bool may_touch = info.foreign && ledger.budget_bytes >= 0;  // the kernel may bring back what evicts something else
    Anchors anchors(versions_, may_touch ? Words::of_foreign_code() : std::vector<uintptr_t>());
    OperatorCall call(info, arrival, turn, versions_, device);
    describer_.describe(call);
    if (device.are_several()) ledger.use(call.place = device.place_of(arrival.values(), arrival.count));  // perhaps only now
    bool careful = is_careful();
    if (careful && have_changed(call)) return false;
    Key missed;
    if (!describer_.find_signature(call)) {
      Stopwatch::Pause pause(watch);  // Python measures its own time
      describer_.make_signature(call, missed);
    }
    ledger.in_backward = Counting::is_in_backward();
    call.state = KernelState::now(info.general, device.is_cpu(), info.states);
    Observed observed(observation_, info, arrival, call.its_signature.get(), &call);
    call.observed = &observed;
    auto admitted = admission_.admit(call);
    if (!admitted) return false;
    watch.leave_out(admitted->all);
    bookkeeping_ns += admitted->all - admitted->elsewhere;
    bool is_beside = !device.is_cpu() && !device.on_main_stream(call.place),
         is_captured = is_beside && truth(callbacks_.get(), "capturing");
    try {
      if (!call.view) recording_.prepare(call, is_captured);
    } catch (...) {
      core_.operators.abandon(call);
      throw;
    }
    if (!device.is_cpu()) arrival.keep();  // only now: a list that the stack alone has need not be copied for the recipe
    std::optional<ListUpdates::Kind> list;
    if (info.handler == HandlerKind::LISTS) list = lists_.kind_of(info, call.values, call.count);
    bool brief = call.signature->calls >= Signature::SETTLED && call.signature->cost < BRIEF_NS, timed = watch.is_on() || !brief;
    int64_t waited = turn.waited_ns, started = timed ? now_ns() : 0, ended = 0;
    observed.runs(true);
    try {
      kernel_.run(call, gil, is_captured, started, ended);
    } catch (...) {
      if (!info.foreign) throw;
      admission_.refuse(call);  // what it has touched may not have fitted
    }
    ledger.use(call.place);  // another thread may have had its turn
    if (list) learn_list(*list, call.its_signature.get());
    if (call.lesson) first_calls_.learn(info, *call.lesson, arrival.results());
    finish(call, careful, is_beside && !is_captured);
    if (!call.view) call_observer_.called();
    if (!device.is_cpu() && (call.is_first || call.needed >= 0)) measured(call, missed);
    if (call.is_first) describer_.remember(missed, call.its_signature.get());
    watch.leave_out(turn.waited_ns - waited);
    if (timed) {
      left_ = ended;
      if (brief) {
        add_brief(ended - started, watch);
      } else {
        operators_ns += ended - started;
        watch.leave_out(ended - started);
      }
    }
    (call.unusual ? info.python_calls : info.native_calls)++;
    return true;
  }

  // Keeps storages in memory that an operator gets besides tensors. PyTorch resizes those that are empty.
  class GivenStorages {
   public:
    GivenStorages(Interposer& interposer, const OperatorInfo& info, Arrival& arrival) {
      if (!info.takes_storage) return;
      for (size_t place = 0; place < arrival.count; place++) {
        if (!arrival.values()[place].isStorage()) continue;
        Version* one = interposer.versions_.at(arrival.values()[place].toStorage().unsafeGetStorageImpl());
        if (one == nullptr) continue;
        one->locks++;
        locked_.emplace_back(one);
      }
      if (locked_.empty()) return;
      try {
        interposer.core_.rematerializer.materialize(locked_, true);
      } catch (...) {
        release();
        Ref error = as_error(std::current_exception());
        if (interposer.core_.backend->is_budget_error() && !truth(error.get(), "explained"))
          checked(PyObject_CallMethod(interposer.callbacks_.get(), "too_small", "O", error.get()));
        throw;
      }
    }
    ~GivenStorages() { release(); }
    GivenStorages(const GivenStorages&) = delete;

   private:
    void release() {
      for (const VersionRef& one : locked_) one->locks--;
      locked_.clear();
    }
    Rematerializer::Targets locked_;
  };

  // -- with care: other threads, and composite operators of libraries (`runtime/patches/foreign_composites.py`) ------------------------

  static Ref as_objects(const std::vector<Version*>& versions) {
    Ref all = checked(PyList_New(0));
    for (const Version* one : versions)
      if (PyList_Append(all.get(), as_object(one).get()) < 0) raise();
    return all;
  }
  static bool is_any(const Ref& list) { return PyList_GET_SIZE(list.get()) != 0; }
  static Ref versions_of(const OperatorCall& call) { return as_objects({call.versions.begin(), call.versions.end()}); }
  static Ref written_by(const OperatorCall& call) {
    std::vector<Version*> all;
    for (const Call::Write& one : call.written) all.push_back(one.target);
    return as_objects(all);
  }
  static Ref changed_by(const OperatorCall& call) {
    std::vector<Version*> all;
    for (const Call::Write& one : call.written) all.push_back(one.target);
    for (size_t hole : call.statistics) all.push_back(call.versions[hole]);
    return as_objects(all);
  }
  // Returns the tensors among a call's results, for Python to look at.
  static Ref results_of(const OperatorCall& call) {
    Ref all = checked(PyList_New(0));
    for (const at::Tensor& tensor : call.arrival.tensors())
      if (PyList_Append(all.get(), to_python(shown(tensor), Enumeration::TENSOR).get()) < 0) raise();
    return all;
  }
  // Returns true if versions of a call's tensors have changed. Waits for other threads that use what it will write to.
  bool have_changed(const OperatorCall& call) {
    bool changes = !call.written.empty() || !call.statistics.empty();
    if (!is_any(composites_) && !(changes && is_any(away_))) return false;
    Untraced untraced;
    WithoutFunctionModes plain;
    c10::impl::ExcludeDispatchKeyGuard only_kernels(WayIn::ABOVE);
    Ref changed = changed_by(call), versions = versions_of(call);
    Ref found = checked(PyObject_CallMethod(callbacks_.get(), "before_operator", "OO", changed.get(), versions.get()));
    return found.get() == Py_True;
  }

  // Called after one of its signature's first calls on a GPU.
  void measured(OperatorCall& call, const Key& missed) {
    int64_t made = 0;
    if (call.info.convolves)
      for (const at::Tensor& tensor : call.arrival.tensors())
        made += versions_.rounded(static_cast<int64_t>(tensor.storage().nbytes()));
    measuring_.finished(*call.signature, call.info, call.needed, made);
    if (call.is_first) measuring_.loaded(call.info, call.its_signature.get(), missed.hash());
  }

  // Called after its kernel has run. is_beside: on a side stream.
  void finish(OperatorCall& call, bool careful, bool is_beside) {
    c10::impl::ExcludeDispatchKeyGuard only_kernels(WayIn::ABOVE);
    Recording::Outputs outputs;
    bool told = careful && is_any(composites_);
    try {
      Ref versions = told || is_beside ? versions_of(call) : Ref(), written = told ? written_by(call) : Ref();
      if (told) checked(PyObject_CallMethod(callbacks_.get(), "before_finish", "O", written.get()));
      bool plain = recording_.outputs_of(call, outputs);
      if (call.info.collective)  // it may go on reading and writing when it has returned
        for (Version* one : call.versions) one->fixed = true;
      std::vector<VersionRef> used;
      std::optional<Locked> until_pinned;
      if (is_beside) {
        for (Version* one : call.versions) used.emplace_back(one);
        until_pinned.emplace(used);
      }
      core_.operators.finish(call, outputs, plain);
      recording_.note_extents(call, outputs);
      if (call.unusual) settle(call, outputs);
      if (!(told || is_beside)) return;
      Untraced untraced;
      WithoutFunctionModes plain_functions;
      Ref results = results_of(call);
      if (told)
        checked(PyObject_CallMethod(callbacks_.get(), "after_finish", "OOO", versions.get(), written.get(), results.get()));
      if (is_beside) checked(PyObject_CallMethod(python_.get(), "used_beside", "OO", versions.get(), results.get()));
    } catch (...) {
      core_.operators.fail(call);
      admission_.refuse(call);
    }
  }
  // What its kernel has kept can be accessed from now on; what it has drawn, other threads may have drawn, too.
  void settle(const OperatorCall& call, const Recording::Outputs& outputs) {
    static const Pin KEPT = as_pin("kept by native code"), DRAWN = as_pin("drawn among threads"),
                     READS_STATE = as_pin("made by an operator that reads state of the program");
    for (const NewStorage& one : outputs) {
      Version* made = ledger.versions.find(reinterpret_cast<int64_t>(one.storage));
      if (made == nullptr) continue;
      if (call.info.collective) made->fixed = true;
      if (!call.unusual->is_pure) made->pin = READS_STATE;
    }
    std::vector<VersionRef> kept;
    for (const at::Tensor& tensor : call.unusual->kept)
      if (Version* one = versions_.find(tensor)) kept.emplace_back(one);
    if (!kept.empty()) core_.mutation.escape_together(kept, KEPT);
    if (!call.unusual->drawn) return;
    auto keep = [&](Version* one) {
      if (one != nullptr) core_.recipes.make_constant(one, DRAWN);
    };
    for (const Call::Write& one : call.written) keep(ledger.versions.find(one.target->key));
    for (const at::Tensor& tensor : call.arrival.tensors()) keep(versions_.find(tensor));
  }

  static inline thread_local const Placeholders::Claim* touched_ = nullptr;  // that this thread is waiting for

  Ref python_, callbacks_, ledger_;
  CallObserver call_observer_;
  Ref reasons_, composites_, away_, kernels_;
  TensorVersions versions_;

 public:
  RecentTensors recent;

 private:
  Core& core_;
  Ledger& ledger;
  unsigned long inside_ = 0;  // the thread that is in an operator without a lock
  std::vector<unsigned long> visitors_;  // on a GPU: the threads whose operators are being handled
  std::shared_ptr<int> ticket_ = std::make_shared<int>();  // shows whether another thread has joined this session
  OperatorTable operators_;
  TurnLock& lock_;
  Replays replays_;
  Admission admission_;
  ListUpdates lists_;
  SplitLists split_lists_{versions_};
  FirstCalls first_calls_;
  Describer describer_;
  Recording recording_;
  Measuring measuring_;
  KernelRun kernel_;
  Observation observation_;
  Slot any_reason_, home_, next_tick_, waiting_;
  Ref known_home_;
  unsigned long home_thread_ = 0;  // the value of `known_home_`
  OwnStorages& own_ = OwnStorages::enter();
  bool shared_ = false;  // by several threads, which take turns with `lock_`
  int64_t evictions_before_ = 0;  // of the step
  int steps_in_part_ = 0;  // in which some operators were only counted, since one was handled in full
  int64_t next_look_ = 0, left_ = 0;  // left_: when one was timed last
  const int64_t own_before_ = Stopwatch::own_ns(), cold_before_ = Stopwatch::cold_ns();
};

}  // namespace dtrrun
