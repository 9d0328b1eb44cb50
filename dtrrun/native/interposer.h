// Handles the operators of one session: most of them on the fast path, and the rest in Python (the `Interposer` of
// `runtime/dispatch/interposer.py`).
//
// `fast` does for plain operators, views and in-place operators what `runtime/dispatch/slow_path.py` does, on the same graph,
// and must always have the same effect. Everything else goes to Python, whole.
#pragma once

#include <memory>

#include "bodies.h"
#include "contention.h"
#include "device.h"
#include "first_calls.h"
#include "lists.h"
#include "observed.h"
#include "operator_table.h"
#include "pytorch.h"
#include "ready.h"
#include "shortage.h"
#include "signatures.h"
#include "stopwatch.h"
#include "turns.h"
#include "way_in.h"

namespace dtrrun {

// An operator that Python handles, for `proceed`: the innermost one of this thread.
struct Underway {
  const OperatorHandle* op;
  DispatchKeySet keys;
  const IValue* values;
  size_t count;
  c10::impl::LocalDispatchKeySet program;  // as the operator would find it without us
  Stack results;                           // once `proceed` has run the kernel
  bool done;
  Ref signature;  // that of calls with the same arguments, if they may take the fast path
  Underway* outer;
};
inline thread_local Underway* underway = nullptr;

// One session. Everything here is done with the GIL.
class Interposer {
 public:
  Interposer(PyObject* python, PyObject* handle, PyObject* classes, const char* device)
      : device(device), python_(Ref::copy(python)), handle_(Ref::copy(handle)), slow_path_(attribute(python, "slow_path")),
        ledger_(attribute(slow_path_.get(), "ledger")), call_observer_(slow_path_.get()),
        reasons_(attribute(slow_path_.get(), "reasons")),
        kernels_(attribute(slow_path_.get(), "kernels")), operators_(python),
        ambient_(attribute(attribute(slow_path_.get(), "ambient").get(), "readers").get(), this->device.is_cpu()),
        versions_(ledger_.get(), as_number(attribute(python, "mask").get())), core_(versions_.core), ledger(core_.ledger),
        lock_(slow_path_.get()),
        replays_(python, ambient_, operators_, this->device),
        readiness_(slow_path_.get(), lock_, versions_), lists_(python, versions_),
        first_calls_(python, attribute(slow_path_.get(), "signatures").get(), versions_),
        observation_(slow_path_.get(), versions_, first_calls_),
        any_reason_(type_of(classes, "Reasons"), "any"),
        home_(type_of(classes, "SlowPath"), "home"), next_tick_(type_of(classes, "SlowPath"), "next_tick"),
        waiting_(type_of(classes, "SlowPath"), "waiting") {
    Ref executor = attribute(attribute(ledger_.get(), "dtr").get(), "executor");
    if (truth(executor.get(), "in_python")) return;
    backend_of(core_).connect(SessionBackend::Native{replays_, this->device, slow_path_.get(), next_tick_,
                                                     as_number(attribute(python, "mask").get())});
  }
  ~Interposer() { backend_of(core_).disconnect(); }

  void handle(const OperatorHandle& op, DispatchKeySet keys, Stack* stack, const Gil& gil, Stopwatch& watch) {
    if (!device.is_cpu() && !is_used_by(op, *stack)) {
      Off off;
      Gil::Released released(gil);
      op.redispatchBoxed(keys & way_in.below, stack);
      return;
    }
    OperatorInfo& info = operators_.of(op);
    Body* body = Body::innermost;
    if (info.composite || (body != nullptr && info.foreign)) {
      take_apart(info, op, keys, stack, gil);
      return;
    }
    Off off;
    if (body != nullptr) {
      ledger.collect_dead();
      body->calls(op, *stack, versions_);
      {
        Gil::Released released(gil);
        op.redispatchBoxed(keys & way_in.below, stack);
      }
      body->made(op, *stack);
      return;
    }
    if (info.handler == HandlerKind::NO_TENSORS) {  // the profiler's marks, in every step of an optimizer
      info.native_calls++;
      Gil::Released released(gil);
      op.redispatchBoxed(keys & way_in.below, stack);
      return;
    }
    ActiveThreadGuard visit(*this);
    Key missed;  // of a call that is the first of its kind
    if (info.handler != HandlerKind::PYTHON && may_be_fast() && in_turn(info, op, keys, stack, gil, watch, missed)) {
      tick_after(left_);
      return;
    }
    in_python(info, op, keys, stack, missed);
  }

  // From now on operators of several threads may be under way. None is on the fast path at this moment.
  void share() { shared_ = true; }

  void forget() {
    signatures_.clear();
    observation_.identities.clear();
    replays_.forget();
  }

  // The signature that calls like the one in Python have here, or null. The slow path has met its tensors.
  Ref known_signature(const Underway& underway) {
    Stack values(underway.values, underway.values + underway.count);
    Turn turn(lock_, false);  // Python has the lock
    Call call{operators_.of(*underway.op), *underway.op, &values, turn};
    return Ref::copy(describe(call) ? signatures_.find(key_) : nullptr);
  }

  bool has_numbers(const Underway& underway) {
    const auto& enumerations = *operators_.of(*underway.op).enumerations;
    for (size_t place = 0; place < underway.count; place++) {
      const IValue& value = underway.values[place];
      if (enumerations[place] != Enumeration::TENSOR) continue;
      if (stands_for_number(value) || (value.isList() && any_stands_for_number(value))) return true;
    }
    return false;
  }

  // Code that is not an operator touches the memory of an evicted storage, and waits for it (`Access.touched`). words: what it has
  // at hand. Returns false if the storage is none of the session's.
  bool touched(const Placeholders::Claim& claim, const std::vector<uintptr_t>& words) {
    PyObject* found = versions_.at(claim.storage);
    if (found == nullptr || !TensorVersions::has_storage(found)) return false;
    Ref kept = Ref::copy(found);
    auto* outer = std::exchange(touched_, &claim);
    struct Ends {
      const Placeholders::Claim* outer;
      ~Ends() { touched_ = outer; }
    } ends{outer};
    Anchors anchors(versions_, words, claim.storage);
    checked(PyObject_CallMethod(python_.get(), "touched", "O", kept.get()));
    return Placeholders::own().is_memory(claim);
  }
  // Moves its memory to where that code looks for it. Returns false if the system has none.
  bool settle() {
    PyObject* found = touched_ == nullptr ? nullptr : versions_.at(touched_->storage);
    ImplRef storage = found == nullptr ? ImplRef() : TensorVersions::storage_of(found);
    if (!storage || is_empty(storage.get())) return false;
    return Placeholders::own().is_memory(*touched_) || Placeholders::own().make_memory(*touched_, storage.get());
  }

  // `Access.pin`, for a gradient that is in memory. Returns false if that is for Python.
  bool pin_gradient(const at::Tensor& gradient) {
    Off off;
    ActiveThreadGuard visit(*this);
    if (!plain(gradient) || !is_plain_kind(gradient) || !may_be_fast()) return false;
    if (versions_.observers.any()) return false;
    if (inside_ != 0) return false;  // a kernel has begun a backward pass of its own
    Turn turn(lock_, shared_);
    if (turn.shared() && any_reason_.is_true(reasons_.get())) return false;  // since it waits
    FastPathScope inside(*this);
    ledger.collect_dead();
    PyObject* found = versions_.of(gradient);
    if (found == nullptr || !version.resident.is_true(found) || !version.needed_by.is_none(found)) return false;
    core_.recipes.make_constant(node_of(found), pins::GRADIENT);
    version.last_access.set_number(found, ledger.clock);
    version.pin.set(found, pins::GRADIENT);
    return true;
  }

  Ref calls(int64_t OperatorInfo::*counter) const { return operators_.calls(counter); }

  // Whether a thread other than this one is on the fast path.
  bool is_inside() const { return inside_ != 0 && inside_ != PyThread_get_thread_ident(); }

  Device device;
  int64_t operators_ns = 0, bookkeeping_ns = 0;

 private:
  // While a thread's operator is here. On a GPU, threads of autograd's come and go, and usually one waits for another.
  // If two bring operators at once, both go to Python from then on: there, locks keep them apart.
  class ActiveThreadGuard {
   public:
    explicit ActiveThreadGuard(Interposer& interposer) : interposer_(interposer), own_(PyThread_get_thread_ident()) {
      if (interposer.device.is_cpu()) return;
      bool others = std::any_of(interposer.visitors_.begin(), interposer.visitors_.end(), [&](auto one) { return one != own_; });
      if (others && !interposer.any_reason_.is_true(interposer.reasons_.get()))
        checked(PyObject_CallMethod(interposer.python_.get(), "overlap", nullptr));
      interposer.visitors_.push_back(own_);
    }
    ~ActiveThreadGuard() {
      auto& all = interposer_.visitors_;
      if (auto own = std::find(all.rbegin(), all.rend(), own_); own != all.rend()) all.erase(std::next(own).base());
    }
    ActiveThreadGuard(const ActiveThreadGuard&) = delete;

   private:
    Interposer& interposer_;
    unsigned long own_;
  };

  // While a thread is on the fast path, where nothing is locked as long as there are no others.
  class FastPathScope {
   public:
    explicit FastPathScope(Interposer& interposer) : interposer_(interposer) {
      if (!interposer.shared_) interposer.inside_ = PyThread_get_thread_ident();
    }
    ~FastPathScope() { interposer_.inside_ = 0; }
    FastPathScope(const FastPathScope&) = delete;

   private:
    Interposer& interposer_;
  };

  // Returns false if that is for Python.
  bool in_turn(OperatorInfo& info, const OperatorHandle& op, DispatchKeySet keys, Stack* stack, const Gil& gil, Stopwatch& watch,
               Key& missed) {
    if (shared_ && info.foreign) return false;  // it may wait for another thread
    if (shared_ && info.handler == HandlerKind::VIEW && gil.held_before() && view_out_of_turn(info, op, keys, stack))
      return true;
    Turn turn(lock_, shared_);
    watch.leave_out(turn.waited_ns);
    FastPathScope inside(*this);
    if (turn.shared() && any_reason_.is_true(reasons_.get())) return false;  // since it waits
    bool done;
    try {
      done = natively(info, op, keys, stack, gil, watch, missed, turn);
    } catch (...) {
      turn.raise_interrupt();
      throw;
    }
    turn.raise_interrupt();
    return done;
  }
  bool natively(OperatorInfo& info, const OperatorHandle& op, DispatchKeySet keys, Stack* stack, const Gil& gil,
                Stopwatch& watch, Key& missed, Turn& turn) {
    if (info.handler == HandlerKind::VIEW)
      return versions_.observers.any() ? observed_view(info, op, keys, stack, watch, missed, turn)
                                       : view(info, op, keys, stack, watch);
    if (info.handler != HandlerKind::LISTS) return fast(info, op, keys, stack, gil, watch, missed, turn);
    return update_lists(info, op, keys, stack, gil, watch) ||
           (info.recorded && lists_.recomputable && fast(info, op, keys, stack, gil, watch, missed, turn));
  }

  // -- an operator in Python -----------------------------------------------------------------------

  // missed: the key of its signature, which the fast path did not know; or empty.
  void in_python(OperatorInfo& info, const OperatorHandle& op, DispatchKeySet keys, Stack* stack, const Key& missed) {
    info.python_calls++;
    Stack made;
    Ref signature;
    size_t count = op.schema().arguments().size();
    const IValue* values = stack->data() + (stack->size() - count);
    auto [args, kwargs] = to_arguments(op.schema(), values, PyTuple_New, [&](size_t place) {
      return to_python(values[place], (*info.enumerations)[place]);
    });
    Ref result;
    {
      Underway call{&op, keys, values, count, c10::impl::tls_local_dispatch_key_set(), {}, false, {}, underway};
      underway = &call;
      struct Ends {
        ~Ends() { underway = underway->outer; }
      } ends;
      Untraced untraced;
      c10::impl::ExcludeDispatchKeyGuard only_kernels(way_in.above);
      bool may_evict = ledger.budget_bytes >= 0;
      Anchors anchors(versions_, may_evict ? Words::of_foreign_code() : std::vector<uintptr_t>());
      PyObject* given[] = {info.func.get(), args.get(), kwargs ? kwargs.get() : Py_None};
      result = checked(PyObject_Vectorcall(handle_.get(), given, 3, nullptr));
      made = std::move(call.results);
      signature = std::move(call.signature);
      if (!call.done) push_results(op.schema(), result.get(), &made);
    }
    if (missed.size() != 0 && signature && !any_reason_.is_true(reasons_.get())) {
      signatures_.add(missed, signature.get());
      first_calls_.learn(info, values, count, made);
    }
    torch::jit::drop(*stack, count);
    for (IValue& value : made) stack->push_back(std::move(value));
  }

  // In inference mode composites arrive whole: their parts come to us.
  void take_apart(OperatorInfo& info, const OperatorHandle& op, DispatchKeySet keys, Stack* stack, const Gil& gil) {
    PyObject* kernel = PyDict_GetItemWithError(kernels_.get(), info.func.get());  // hashes it in Python
    if (kernel == nullptr && PyErr_Occurred()) raise();
    if (kernel == nullptr) {
      Gil::Released released(gil);
      op.redispatchBoxed(keys & way_in.below, stack);
      return;
    }
    size_t count = op.schema().arguments().size();
    const IValue* values = stack->data() + (stack->size() - count);
    auto [args, kwargs] = to_arguments(op.schema(), values, PyTuple_New, [&](size_t place) {
      return to_python(values[place], (*info.enumerations)[place]);
    });
    Ref result = checked(PyObject_Call(kernel, args.get(), kwargs.get()));
    torch::jit::drop(*stack, count);
    push_results(op.schema(), result.get(), stack);
  }

  bool is_used_by(const OperatorHandle& op, const Stack& stack) const {
    size_t count = op.schema().arguments().size();
    return device.is_used_by(stack.data() + (stack.size() - count), count);
  }

  bool may_be_fast() {
    if (device.is_cpu()) return !any_reason_.is_true(reasons_.get()) && (shared_ || is_home());
    if (!(device.is_bound() && device.on_main_stream()) || any_reason_.is_true(reasons_.get())) return false;
    if (is_home()) return true;
    // On a GPU, backward passes run in a thread of autograd's, which is as good as the one that waits for it.
    thread_local std::weak_ptr<int> admitted;
    if (admitted.lock() != ticket_) {
      checked(PyObject_CallMethod(python_.get(), "join", nullptr));
      admitted = ticket_;
    }
    return !any_reason_.is_true(reasons_.get());
  }
  bool is_home() {
    PyObject* home = home_.get(slow_path_.get());
    return home != Py_None && PyLong_AsUnsignedLong(home) == PyThread_get_thread_ident();
  }

  // -- views -----------------------------------------------------------------------------------------

  bool view(OperatorInfo& info, const OperatorHandle& op, DispatchKeySet keys, Stack* stack, const Stopwatch& watch) {
    ledger.collect_dead();
    const IValue& first = (*stack)[stack->size() - op.schema().arguments().size()];
    if (!first.isTensor() || !plain(first.toTensor())) return false;
    PyObject* found = known_or_adopted(first.toTensor());
    if (found == nullptr || !(version.resident.is_true(found) || info.untouching)) return false;
    version.last_access.set_number(found, ledger.clock);
    int64_t started = watch.is_on() ? now_ns() : 0;
    op.redispatchBoxed(keys & way_in.below, stack);  // too short to give up the GIL for
    if (watch.is_on()) operators_ns += Stopwatch::EACH * (now_ns() - started);
    ledger.age++;
    bookkeeping_ns += watch.before(started);
    info.native_calls++;
    return true;
  }

  // The same while operators are observed: the view needs a signature, which says what it costs.
  bool observed_view(OperatorInfo& info, const OperatorHandle& op, DispatchKeySet keys, Stack* stack, const Stopwatch& watch,
                     Key& missed, Turn& turn) {
    ledger.collect_dead();
    Call call{info, op, stack, turn};
    call.clock = ledger.clock;
    if (!describe(call)) return false;
    if (!find_signature(call, missed)) return false;
    PyObject* found = call.signature.get();
    Observed observed(observation_, info, op, *stack, found);
    observed.runs(true);
    int64_t started = now_ns();
    bool done = view(info, op, keys, stack, watch);
    observed.runs(done);
    if (!done) return false;
    int64_t taken = now_ns() - started;
    if (call.unpriced) first_calls_.price(found, info, *call.unpriced, op.schema(), *stack);
    as_signature(found)->figures.learn_cost(taken);
    observed.finished();
    if (call.is_first) remember(missed, found);
    return true;
  }

  // The same whoever's turn it is, without a trace. The caller has the GIL, as when it asks a view for its `grad_fn`, and may
  // have a mutex of PyTorch's, too. To wait for a turn gives up the GIL, and so may any Python code, to a thread that waits
  // for that mutex and keeps the GIL meanwhile.
  bool view_out_of_turn(OperatorInfo& info, const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    const IValue& first = (*stack)[stack->size() - op.schema().arguments().size()];
    if (!first.isTensor() || !plain(first.toTensor())) return false;
    ledger.some_died();  // so that the table knows
    PyObject* found = versions_.of(first.toTensor());
    if (found == nullptr || !(version.resident.is_true(found) || info.untouching)) return false;
    op.redispatchBoxed(keys & way_in.below, stack);
    info.native_calls++;
    return true;
  }

  // -- lists -----------------------------------------------------------------------------------------

  bool update_lists(OperatorInfo& info, const OperatorHandle& op, DispatchKeySet keys, Stack* stack, const Gil& gil,
                    const Stopwatch& watch) {
    const IValue* values = stack->data() + (stack->size() - op.schema().arguments().size());
    if (!lists_.prepare(info, op.schema(), values)) return false;
    Observed observed(observation_, info, op, *stack, lists_.prepared());
    observed.runs(true);
    int64_t started = now_ns(), ended = 0;
    try {
      {
        Unkept unkept;
        Gil::Released released(gil);
        op.redispatchBoxed(keys & way_in.below, stack);
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
    bookkeeping_ns += watch.before(started);
    info.native_calls++;
    left_ = ended;
    return true;
  }

  void tick_after(int64_t now) {
    if (now <= next_look_) return;
    next_look_ = now + 5'000'000;
    if (now > next_tick_.number(slow_path_.get())) checked(PyObject_CallMethod(slow_path_.get(), "tick", nullptr));
  }

  // The version of a tensor's storage, entered as a constant if it is new: borrowed, or null if that is for Python.
  PyObject* known_or_adopted(const at::Tensor& tensor) {
    if (PyObject* known = versions_.of(tensor)) return known;
    if (!tensor.unsafeGetTensorImpl()->has_storage() || !is_plain_kind(tensor) || tensor.requires_grad() ||
        tensor.is_conj() || tensor.is_neg())
      return nullptr;
    Untraced untraced;
    c10::impl::ExcludeDispatchKeyGuard only_kernels(way_in.above);
    Ref object = to_python(shown(tensor), Enumeration::TENSOR);
    checked(PyObject_CallMethod(slow_path_.get(), "version_of", "O", object.get()));
    bool fits = ledger.resident_bytes <= ledger.limit;
    return fits ? versions_.of(tensor) : nullptr;  // Python raises the error
  }

  static constexpr size_t FEW = 16;

  static bool plain(const at::Tensor& tensor) {
    return tensor.defined() && !has_python_key(tensor);
  }

  // -- the fast path ---------------------------------------------------------------------------------

  static IValue number_in(const at::Tensor& tensor) {
    switch (tensor.scalar_type()) {
      case at::kLong:
        return *tensor.const_data_ptr<int64_t>();
      case at::kBool:
        return *tensor.const_data_ptr<bool>();
      case at::kDouble:
        return *tensor.const_data_ptr<double>();
      default:
        return IValue(c10::complex<double>());
    }
  }

  // A call on the fast path.
  struct Call {
    OperatorInfo& info;
    const OperatorHandle& op;
    Stack* stack;
    Turn& turn;
    size_t count = op.schema().arguments().size(), first = stack->size() - count;  // of its arguments
    int64_t clock = 0;                               // when it came
    c10::SmallVector<Ref, 6> inputs;                 // the versions of its tensors; afterwards the recipe's
    bool inputs_resident = false;
    bool excludes = false;                           // it updates running statistics, which a replay leaves out
    c10::SmallVector<int, 8> holes = c10::SmallVector<int, 8>(count, VALUE);  // as in `Recipe`
    c10::SmallVector<std::pair<size_t, IValue>, 1> gaps;  // which items of a list of tensors there are
    Ref signature, state;
    c10::SmallVector<Ref, 2> statistics;  // the versions of running statistics, which are not among the inputs
    bool settles = false;                 // what it writes to is a constant from now on
    std::vector<PyObject*> targets;  // the versions that it writes to
    Py_ssize_t hole = -1;            // the place of the first of them among the inputs
    bool overwrites = false;         // all of it, without reading it
    Ref maker;                       // its recipe, if it will have one
    c10::SmallVector<std::pair<Py_ssize_t, Ref>, 2> made;  // the versions that this makes, and where; unless it is only one
    Ref target;                      // what it overwrites, and so does not read
    Ref rng;                         // the state of the generator that it draws from
    Ref outputs;                     // those that Python has entered
    bool is_first = false;           // of its signature
    std::optional<FirstCalls::Unpriced> unpriced;  // until it has run

    const IValue& argument(size_t place) const { return (*stack)[first + place]; }
  };

  bool fast(OperatorInfo& info, const OperatorHandle& op, DispatchKeySet keys, Stack* stack, const Gil& gil, Stopwatch& watch,
            Key& missed, Turn& turn) {
    ledger.collect_dead();
    Call call{info, op, stack, turn};
    call.clock = ledger.clock;
    if (info.opaque && versions_.fingerprints.are_taken()) return false;  // one of its results is a workspace
    if (!describe(call)) return false;
    // Only now: room is made for a constant that has just been met, and the inputs before it have not been locked.
    call.inputs_resident = are_resident(call.inputs);
    if (!are_resident(call.statistics)) return false;
    if (!find_signature(call, missed)) return false;
    PyObject* found = call.signature.get();
    call.state = Ref::copy(ambient_.read(info.family.get(), info.state, info.general));
    Observed observed(observation_, info, op, *stack, found);
    if (info.handler == HandlerKind::WRITES && !prepare_write(call)) return false;
    if (info.updates && !prepare_statistics(call)) return false;
    auto taken = make_ready(call);
    if (!taken) return false;
    watch.leave_out(*taken);
    if (!are_resident(call.statistics)) return false;  // which were not locked while room was made
    if (info.updates && !are_free(call.statistics)) return false;
    if (info.handler == HandlerKind::WRITES && !find_target(call)) return false;
    if (info.handler == HandlerKind::LISTS && !find_targets(call)) return false;
    if (!record(call)) return false;
    Stack arguments;  // the kernel takes those on the stack
    if (!device.is_cpu()) arguments.assign(stack->begin() + call.first, stack->end());
    bool settled = signature.calls.number(found) >= Signature::SETTLED;
    bool brief = settled && signature.cost.number(found) < BRIEF_NS, timed = watch.is_on() || !brief;
    int64_t waited = turn.waited_ns, started = timed ? now_ns() : 0, ended = 0;
    observed.runs(true);
    if (!run(call, keys, gil, started, ended)) {  // out of memory
      observed.runs(false);
      stack->resize(call.first);
      stack->insert(stack->end(), arguments.begin(), arguments.end());
      return false;
    }
    if (call.targets.empty() || info.makes_tensors) enter(call, found);
    call.made.clear();
    observed.finished(call.outputs.get());
    call_observer_.called();
    if (ledger.resident_bytes > ledger.limit) {
      c10::impl::ExcludeDispatchKeyGuard only_kernels(way_in.above);
      Ref result = results(op.schema(), *stack);
      Anchors anchors(versions_, Words::of_foreign_code());
      checked(PyObject_CallMethod(slow_path_.get(), "shrink", "OO", info.operator_.get(), result.get()));
    }
    if (call.is_first) remember(missed, found);
    if (timed) {
      left_ = now_ns();
      operators_ns += (brief ? Stopwatch::EACH : 1) * (ended - started);
      if (watch.is_on())
        bookkeeping_ns += watch.before(started) + Stopwatch::EACH * (left_ - ended - (turn.waited_ns - waited));
    }
    info.native_calls++;
    return true;
  }

  // Finds the signature of a call that has been described, or makes it for a first one. missed: receives the key of that.
  // Returns false if that is for Python.
  bool find_signature(Call& call, Key& missed) {
    call.signature = Ref::copy(signatures_.find(key_));  // the table may be cleared while the operator runs
    if (call.signature) return true;
    call.is_first = true;
    std::swap(missed, key_);
    const IValue* values = call.stack->data() + call.first;
    call.signature = first_calls_.signature_of(call.info, call.op, values, call.inputs, call.statistics);
    if (!call.signature) return false;
    call.unpriced = first_calls_.unpriced(call.info, call.op, values, call.inputs, call.statistics);
    return true;
  }
  // That call has run.
  void remember(const Key& key, PyObject* found) {
    if (signatures_.find(key) != nullptr) return;  // another thread's call was the first
    first_calls_.made(found);
    signatures_.add(key, found);
  }

  // Finds the versions of a call's tensors, and makes the key of its signature. Returns false if it is not for the
  // fast path.
  bool describe(Call& call) {
    const OperatorInfo& info = call.info;
    const auto& arguments = call.op.schema().arguments();
    auto has = [&](int place) { return call.argument(place).isTensor() && call.argument(place).toTensor().defined(); };
    call.excludes = info.statistics[0] >= 0 && (has(info.statistics[0]) || has(info.statistics[1])) &&
                    (info.trains < 0 || call.argument(info.trains) == IValue(true));
    key_.clear();
    // For a recipe, or for observers.
    offsets_matter_ = info.makes_tensors || info.handler != HandlerKind::PLAIN;
    key_.add(reinterpret_cast<uint64_t>(&info));
    for (size_t place = 0; place < call.count; place++) {
      const IValue& value = call.argument(place);
      bool holds_tensors = value.isTensorList() || value.isOptionalTensorList();
      if (holds_tensors && arguments[place].kwarg_only()) return false;
      if (value.isTensor()) {
        if (!describe(call, place, value.toTensor(), arguments[place].kwarg_only())) return false;
      } else if (value.isTensorList()) {
        auto tensors = value.toTensorVector();
        key_.add_list(tensors.size());
        if (place == info.written) call.hole = static_cast<Py_ssize_t>(call.inputs.size());
        for (const at::Tensor& tensor : tensors)
          if (!read(call, tensor)) return false;
        call.holes[place] = static_cast<int>(tensors.size());
      } else if (value.isOptionalTensorList()) {  // indices
        c10::List<bool> given;
        for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
          given.push_back(tensor.has_value() && tensor->defined());
          if (given.get(given.size() - 1) && !read(call, *tensor)) return false;
        }
        key_.add(IValue(given));
        call.holes[place] = static_cast<int>(given.size());
        call.gaps.emplace_back(place, std::move(given));
      } else if (info.sized_by_numbers && value.isDouble()) {
        key_.add_size(value.toDouble());
      } else if (!key_.add(value) || (value.isDevice() && !device.is_meant_by(value.toDevice()))) {
        return false;
      }
    }
    key_.add(static_cast<uint64_t>(c10::typeMetaToScalarType(c10::get_default_dtype())) |
             static_cast<uint64_t>(info.opaque && c10::GradMode::is_enabled()) << 8);
    return true;
  }
  bool describe(Call& call, size_t place, const at::Tensor& tensor, bool kwarg_only) {
    const OperatorInfo& info = call.info;
    auto is_place = [&](int other) { return static_cast<int>(place) == other; };
    if (!tensor.defined()) {
      key_.add(IValue());
    } else if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {  // a number of the program's, for Python too
      if (!tensor.device().is_cpu() || (*info.enumerations)[place] == Enumeration::TENSOR) return false;
      key_.add(number_in(tensor));
    } else if (kwarg_only) {
      return false;
    } else if (call.excludes && (is_place(info.statistics[0]) || is_place(info.statistics[1]))) {
      PyObject* found = plain(tensor) ? versions_.of(tensor) : nullptr;
      if (found == nullptr || version.escaped.is_true(found) || !version.resident.is_true(found)) return false;
      if (!call.statistics.empty() && call.statistics[0].get() == found) return false;  // both in one storage
      key_.add(tensor);
      call.holes[place] = STATISTICS;
      call.statistics.push_back(Ref::copy(found));
    } else {
      if (place == info.written) call.hole = static_cast<Py_ssize_t>(call.inputs.size());
      if (!read(call, tensor)) return false;
      call.holes[place] = TENSOR;
    }
    return true;
  }
  bool read(Call& call, const at::Tensor& tensor) {
    if (!plain(tensor) || !device.has(tensor.device())) return false;
    PyObject* found = known_or_adopted(tensor);
    if (found == nullptr || versions_.fingerprints.is_workspace(found)) return false;
    if (version.escaped.is_true(found) && call.info.handler != HandlerKind::VIEW) return false;
    version.last_access.set_number(found, call.clock);
    key_.add(tensor, offsets_matter_);
    call.inputs.push_back(Ref::copy(found));
    return true;
  }

  template <class Versions>
  bool are_resident(const Versions& all) const {
    return std::all_of(all.begin(), all.end(), [&](const Ref& one) { return version.resident.is_true(one.get()); });
  }

  // Brings the inputs back, and makes room. Returns the time in ns that this has taken, which is accounted for, or nothing if
  // that is for Python.
  std::optional<int64_t> make_ready(const Call& call) {
    PyObject* found = call.signature.get();
    bool inputs_resident = are_resident(call.inputs);  // what is written to may have been rescued since
    if (inputs_resident && readiness_.is_ready(found)) return 0;
    c10::impl::ExcludeDispatchKeyGuard only_kernels(way_in.above);
    int64_t began = now_ns();
    auto elsewhere = readiness_.make_ready(call.inputs, inputs_resident, found, call.turn.shared());
    if (!elsewhere) return elsewhere;
    int64_t taken = now_ns() - began;
    bookkeeping_ns += taken - *elsewhere;
    return taken;
  }

  // `Mutation.prepare_writes`, before room is made: a leaf, or state that persists over steps, is a constant from now on,
  // and what depends on a constant is rescued. Returns false if that is for Python.
  bool prepare_write(Call& call) {
    if (call.hole < 0) return false;
    PyObject* target = call.inputs[call.hole].get();
    bool leaf = is_leaf(call.argument(call.info.written).toTensor());
    if (leaf && version.pin.is_none(target)) return false;  // Python meets it
    bool changes = version.operation.is_none(target) || leaf || !is_recent(target);
    if (changes && versions_.may_be_copied(target)) return false;
    if (!version.operation.is_none(target) && (leaf || !is_recent(target))) {
      if (!call.inputs_resident) return false;
      core_.recipes.make_constant(node_of(target), pins::UPDATED_IN_PLACE);
      call.settles = true;
    }
    if (leaf) version.pin.set(target, pins::PARAMETER);
    if (!version.operation.is_none(target) || version.needed_by.is_none(target)) return true;
    return call.inputs_resident && core_.rescue.resident_dependents_of(node_of(target));
  }
  // The same for running statistics, as in `Operators::admit`.
  bool prepare_statistics(const Call& call) {
    for (const Ref& one : call.statistics) {
      if (!call.inputs_resident && !is_free(one.get())) return false;
      if (versions_.may_be_copied(one.get())) return false;
      core_.recipes.make_constant(node_of(one.get()), pins::RUNNING_STATISTICS);
      if (!core_.rescue.resident_dependents_of(node_of(one.get()))) return false;
    }
    return true;
  }
  // Whether nothing has come to depend on these since, for which room was made.
  bool are_free(const c10::SmallVector<Ref, 2>& statistics) const {
    return std::all_of(statistics.begin(), statistics.end(), [&](const Ref& one) { return is_free(one.get()); });
  }
  bool is_free(PyObject* constant) const {
    return version.operation.is_none(constant) && version.needed_by.is_none(constant) && !is_in_use(constant);
  }
  // Whether an operator of another thread that is under way uses this memory.
  bool is_in_use(PyObject* one) const { return shared_ && version.locks.number(one) != 0; }

  // Finds the version that an in-place operator writes to. Returns false if that is not for the fast path.
  bool find_target(Call& call) {
    PyObject* target = call.inputs[call.hole].get();
    const at::Tensor& tensor = call.argument(call.info.written).toTensor();
    if (is_in_use(target) || (call.info.makes_tensors && version.operation.is_none(target))) return false;
    call.targets.push_back(target);
    bool constant = version.operation.is_none(target);
    bool stays = call.settles || (constant && is_sticky(target));
    call.overwrites = call.info.overwrites && !stays && overwrites_all(tensor, call);
    return constant ? version.needed_by.is_none(target) : may_be_recorded(target, tensor);
  }
  // The same for one that writes to a list of them, which all can be recomputed.
  bool find_targets(Call& call) {
    auto tensors = call.argument(0).toTensorVector();
    for (size_t i = 0; i < tensors.size(); i++) {
      PyObject* target = call.inputs[i].get();
      if (is_in_use(target) || version.operation.is_none(target) || !may_be_recorded(target, tensors[i])) return false;
      call.targets.push_back(target);
    }
    return std::unordered_set(call.targets.begin(), call.targets.end()).size() == tensors.size();
  }
  // Whether what can be recomputed may still be, once it has been written to.
  bool may_be_recorded(PyObject* target, const at::Tensor& tensor) const { return is_recent(target) && !is_leaf(tensor); }
  // Whether its history is worth keeping.
  bool is_recent(PyObject* target) const {
    return core_.mutation.is_recent(node_of(target));
  }

  // Takes down the call's recipe, if it can have one. Returns false if that is not for the fast path.
  bool record(Call& call) {
    const OperatorInfo& info = call.info;
    PyObject *found = call.signature.get(), *func = info.func.get();
    if (call.excludes) {
      func = info.replay.get();
      found = replayed_as(found);
      if (found == nullptr) return false;
    }
    if (info.random && (has_recipe(call) || !device.is_cpu())) {  // a GPU may find no memory, and draw again
      int64_t drawn = signature.output_bytes.number(call.signature.get());
      for (PyObject* target : call.targets) drawn += version.nbytes.number(target);
      Ref generator = generator_of(call);
      call.rng = checked(PyObject_CallMethod(python_.get(), "capture", "LO", static_cast<long long>(drawn), generator.get()));
    }
    if (!has_recipe(call)) return true;
    Ref tensors;
    bool repeats = reads_twice(call.inputs);
    if (call.overwrites) {
      tensors = checked(PyObject_CallMethod(python_.get(), "overwriting", "(O)", as_tuple(call.inputs).get()));
      call.target = std::move(call.inputs[0]);
    } else if (repeats) {
      tensors = as_tuple(call.inputs);
    }
    size_t first_read = call.overwrites ? 1 : 0;
    call.maker = blank_recorded_operation(call.inputs.size() - first_read, call.count);
    OperationObject* maker = as_operation(call.maker.get());
    set_signature(maker, found);
    if (tensors) take_tensors(maker, std::move(tensors));
    std::unordered_set<PyObject*> read;
    for (size_t i = first_read; i < call.inputs.size(); i++) {
      if (repeats && !read.insert(call.inputs[i].get()).second) continue;
      add_read(maker, call.inputs[i].release());
    }
    call.inputs.clear();
    auto* recipe = new (maker->operation.end()) Recipe(call.op, info.enumerations, func, call.state.get(), call.count);
    maker->has_recipe = true;
    for (size_t place = 0; place < call.count; place++) {
      if (call.holes[place] == VALUE) recipe->values()[place] = to_keep(call.argument(place));
      recipe->holes()[place] = call.holes[place] == STATISTICS ? VALUE : call.holes[place];
    }
    for (auto& [place, given] : call.gaps) recipe->values()[place] = std::move(given);
    recipe->rng = Ref::copy(call.rng.get());
    return true;
  }

  // The generator that a call was given, or None.
  static Ref generator_of(const Call& call) {
    for (size_t place = 0; place < call.count; place++)
      if (call.argument(place).isGenerator()) return to_python(call.argument(place), Enumeration::NONE);
    return Ref::copy(Py_None);
  }

  // Whether some version is among these more than once, as in `x * x`. It is locked, and counts as read, only once.
  static bool reads_twice(const c10::SmallVector<Ref, 6>& versions) {
    if (versions.size() < FEW) {
      for (size_t i = 1; i < versions.size(); i++)
        for (size_t before = 0; before < i; before++)
          if (versions[before].get() == versions[i].get()) return true;
      return false;
    }
    std::unordered_set<PyObject*> seen;
    return !std::all_of(versions.begin(), versions.end(), [&](const Ref& one) { return seen.insert(one.get()).second; });
  }

  // Whether what the call makes, or writes to, can be computed again.
  bool has_recipe(const Call& call) const {
    return call.targets.empty() || call.overwrites || !version.operation.is_none(call.targets[0]);
  }

  // Runs the kernel, and makes the versions of what it has written to. Returns false if it did not begin for want of a GPU's
  // memory: then Python will run it again. started: when it begins, or 0 if nobody wants to know when it ended.
  bool run(Call& call, DispatchKeySet keys, const Gil& gil, int64_t started, int64_t& ended) {
    PyObject* found = call.signature.get();
    OwnTime own(signature.calls.number(found) < Signature::SETTLED, started);
    bool has_run = false;
    auto run_kernel = [&] {
      Keeping keeping(*this, call);
      call.op.redispatchBoxed(keys & way_in.below, call.stack);
      has_run = true;
      if (started != 0) ended = now_ns();
    };
    try {
      if (device.is_cpu() && signature.calls.number(found) != 0 && signature.cost.number(found) < BRIEF_NS) {
        run_kernel();
      } else {
        Others others(*this, call);
        Gil::Released released(gil);
        run_kernel();
      }
      if (call.unpriced) first_calls_.price(found, call.info, *call.unpriced, call.op.schema(), *call.stack);
      ledger.ran(as_signature(found)->figures, own.of(ended - started));
      ledger.collect_dead();
      if (call.info.updates)
        for (const Ref& one : call.statistics)
          if (version.used.is_true(one.get())) versions_.supersede(one.get(), nullptr, 0);
      if (call.targets.empty()) return true;
      bool may_grow = call.info.handler == HandlerKind::WRITES;  // `addbmm_`, if what it writes to is expanded
      const c10::StorageImpl* written = may_grow ? as_stored(call.targets[0])->storage : nullptr;
      if (call.maker && has_recipe(call)) {
        mark_used(call.maker.get());
        for (size_t i = 0; i < call.targets.size(); i++)
          call.made.emplace_back(~(call.hole + static_cast<Py_ssize_t>(i)),
                                 versions_.supersede(call.targets[i], call.maker.get(), signature.cost.number(found)));
        set_outputs(call.maker.get(), call.made);
      } else if (version.used.is_true(call.targets[0])) {
        versions_.supersede(call.targets[0], nullptr, 0);
      }
      if (written != nullptr) note_size(written);
    } catch (...) {
      bool retried = false;
      try {
        PyObject *operator_ = call.info.operator_.get(), *rng = call.rng.get();
        retried = !device.is_cpu() && !has_run && can_retry(python_.get(), operator_, rng);
      } catch (const python_error&) {  // an interrupt
        half_written(call);
        throw;
      }
      if (retried) return false;
      half_written(call);
      throw;
    }
    return true;
  }

  // Calls `function` with each version that a call reads, also after `record`.
  template <class Function>
  void each_input(const Call& call, const Function& function) {
    for (const Ref& one : call.inputs) function(one.get());
    if (!call.maker) return;  // which has taken them
    for (PyObject* one : operation.inputs(call.maker.get())) function(one);
  }

  // While a kernel runs, other threads may have their turns, unless it writes to what is in the ledger, or draws from a
  // generator. Nobody evicts what it reads meanwhile, or takes the room that was made for it.
  class Others {
   public:
    Others(Interposer& interposer, Call& call) : interposer_(interposer), call_(call) {
      may_go_on_ = call.turn.shared() && call.targets.empty() && call.statistics.empty() && !call.info.random;
      if (!may_go_on_) return;
      interposer.ledger.reserve(reinterpret_cast<int64_t>(&call), PyThread_get_thread_ident(),
                                interposer.signature.output_bytes.number(call.signature.get()));
      if (call.maker) interposer.mark_used(call.maker.get());
      interposer.each_input(call, [&](PyObject* one) { interposer_.version.locks.add(one, 1); });
      call.turn.pause();
    }
    ~Others() {
      if (!may_go_on_) return;
      call_.turn.resume();
      interposer_.each_input(call_, [&](PyObject* one) { interposer_.version.locks.add(one, -1); });
      interposer_.ledger.give_back(reinterpret_cast<int64_t>(&call_));
      if (interposer_.waiting_.number(interposer_.slow_path_.get()) == 0) return;
      if (!Ref(PyObject_CallMethod(interposer_.slow_path_.get(), "tell_waiting", nullptr))) PyErr_WriteUnraisable(nullptr);
    }
    Others(const Others&) = delete;

   private:
    Interposer& interposer_;
    Call& call_;
    bool may_go_on_;
  };

  // The bytes of what has been written to, if they are others than before.
  void note_size(const c10::StorageImpl* storage) {
    PyObject* found = versions_.at(storage);
    int64_t nbytes = versions_.rounded(static_cast<int64_t>(storage->nbytes()));
    if (found == nullptr || nbytes == version.nbytes.number(found)) return;
    checked(PyObject_CallMethod(ledger_.get(), "resized", "OL", found, static_cast<long long>(nbytes)));
  }

  // For a kernel on the fast path that is refused memory, while other things are evicted for it.
  class Keeping final : public Shortage::Kernel {
   public:
    Keeping(Interposer& interposer, Call& call) : interposer_(interposer), call_(call) {}
    bool keep(bool on) override {
      if (on && call_.maker) interposer_.mark_used(call_.maker.get());
      auto lock = [&](PyObject* one) { interposer_.version.locks.add(one, on ? 1 : -1); };
      interposer_.each_input(call_, lock);
      for (PyObject* target : call_.targets) lock(target);
      for (const Ref& one : call_.statistics) lock(one.get());
      if (!on) {
        for (PyObject* one : changing_) interposer_.version.escaped.set(one, false);
        changing_.clear();
        return true;
      }
      // Nothing may come to depend on a constant that is half written, as in `Mutation.about_to_change`.
      for (PyObject* target : call_.targets)
        if (interposer_.version.operation.is_none(target)) changes(target);
      for (const Ref& one : call_.statistics) changes(one.get());
      return true;
    }

   private:
    void changes(PyObject* constant) {
      if (interposer_.version.escaped.is_true(constant)) return;
      interposer_.version.escaped.set(constant, true);
      changing_.push_back(constant);
    }
    Interposer& interposer_;
    Call& call_;
    c10::SmallVector<PyObject*, 2> changing_;
  };
  // The same for one whose tensors are not known here.
  class Unkept final : public Shortage::Kernel {
   public:
    bool keep(bool) override { return false; }
  };

  void half_written(const Call& call) {
    auto write = [&](PyObject* target) {
      core_.recipes.half_written(node_of(target));
    };
    for (PyObject* target : call.targets) write(target);
    if (call.info.updates)
      for (const Ref& one : call.statistics) write(one.get());
  }

  // Whether overwriting this tensor leaves nothing of what its storage held, which no other argument of the call has
  // (`TensorCall.overwrites`).
  static bool overwrites_all(const at::Tensor& tensor, const Call& call) {
    PyObject* target = call.inputs[0].get();
    for (size_t i = 1; i < call.inputs.size(); i++)
      if (call.inputs[i].get() == target) return false;
    return tensor.nbytes() == tensor.storage().nbytes() && tensor.is_non_overlapping_and_dense();
  }

  // Whether a constant remains one when all of it is overwritten.
  static bool is_sticky(PyObject* target) { return Mutation::is_sticky(node_of(target)->pin); }

  // The signature of a replay without the running statistics (`TensorCall.replay_signature`): borrowed, or null.
  PyObject* replayed_as(PyObject* found) {
    PyObject* kept = signature.replayed_as.get(found);
    if (kept == Py_None) return nullptr;
    signature.cost.set_number(kept, signature.cost.number(found));
    signature.guessed.set(kept, signature.guessed.is_true(found));
    signature.output_bytes.set_number(kept, signature.output_bytes.number(found));
    return kept;
  }

  static void set_outputs(PyObject* maker, const c10::SmallVector<std::pair<Py_ssize_t, Ref>, 2>& made) {
    if (made.size() == 1) {
      recorded_in(maker)->where = made[0].first;
      return;
    }
    std::vector<Output> outputs;
    for (const auto& [where, one] : made) outputs.push_back({where, WeakVersion(node_of(one.get()))});
    dtrrun::set_outputs(*recorded_in(maker), std::move(outputs));
  }

  // Some recipe reads the inputs of this operation.
  void mark_used(PyObject* maker) {
    for (PyObject* source : operation.inputs(maker)) version.used.set(source, true);
  }

  // Python looks at these, and knows what to do with those that are not plain tensors over a storage.
  bool is_plain_kind(const at::Tensor& tensor) const {
    auto keys = tensor.unsafeGetTensorImpl()->key_set();
    return tensor.layout() == at::kStrided && !tensor.is_quantized() && !keys.has(DispatchKey::NestedTensor) &&
           !keys.has(DispatchKey::ZeroTensor) && device.has(tensor.device());
  }

  // Enters the new storages among the results.
  void enter(Call& call, PyObject* found) {
    OperatorInfo& info = call.info;
    const Stack& stack = *call.stack;
    size_t count = call.op.schema().returns().size(), first = stack.size() - count;
    auto tensors = tensors_in(call.op.schema(), stack);
    bool writes = !call.targets.empty(), single = count == 1 && stack[first].isTensor() && !writes;
    bool plain = std::all_of(tensors.begin(), tensors.end(), [&](const at::Tensor& tensor) {
      const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
      return impl->has_storage() && is_plain_kind(tensor) &&
             WatchedStorage::can_watch(impl->unsafe_storage().unsafeGetStorageImpl());
    });
    if (!plain) {
      if (writes) throw std::runtime_error("dtrrun: internal error: an operator in place made an unusual tensor");
      enter_in_python(call, found);
      return;
    }
    PyObject* maker = info.uninitialised ? nullptr : call.maker.get();
    bool any = writes;  // whether a version has the recipe
    int64_t total = 0;
    for (size_t place = 0; place < tensors.size(); place++) {
      const at::Tensor& tensor = tensors[place];
      c10::StorageImpl* storage = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
      if (versions_.at(storage) != nullptr) continue;
      if (maker != nullptr && !std::exchange(any, true)) mark_used(maker);
      Ref made = versions_.enter(storage, maker, signature.cost.number(found), pins::UNINITIALISED);
      if (maker != nullptr) versions_.fingerprints.note(made.get(), tensor);
      total += version.nbytes.number(made.get());
      if (!single) call.made.emplace_back(static_cast<Py_ssize_t>(place), std::move(made));
    }
    if (!single && !tensors.empty() && any) set_outputs(maker, call.made);
    int64_t expected = signature.output_bytes.number(found);  // on a GPU with its workspace
    if (signature.guessed.is_true(found) && total == expected) {
      signature.guessed.set(found, false);
    } else if (signature.guessed.is_true(found) ||
               (!single && !tensors.empty() && (device.is_cpu() ? total != expected : total > expected))) {
      checked(PyObject_CallMethod(python_.get(), "learn", "OOL", found, info.operator_.get(), total));
    }
  }

  void enter_in_python(Call& call, PyObject* found) {
    Untraced untraced;
    c10::impl::ExcludeDispatchKeyGuard only_kernels(way_in.above);
    const Recipe& recipe = *recipe_of(call.maker.get());
    Ref recorded = as_sequence(recipe), result = results(call.op.schema(), *call.stack);
    Ref tensors = attribute(call.maker.get(), "tensors");
    call.outputs = checked(PyObject_CallMethod(
        slow_path_.get(), "enter", "OOOOOOOOO", result.get(), call.info.func.get(), call.info.operator_.get(), found,
        PyTuple_GET_ITEM(recorded.get(), 1), PyTuple_GET_ITEM(recorded.get(), 2), tensors.get(), call.state.get(),
        call.rng ? call.rng.get() : Py_None));
  }

  static inline thread_local const Placeholders::Claim* touched_ = nullptr;  // what this thread waits for

  Ref python_, handle_, slow_path_, ledger_;
  CallObserver call_observer_;
  Ref reasons_, kernels_;
  Ambient ambient_;
  TensorVersions versions_;
  Core& core_;
  Ledger& ledger;
  unsigned long inside_ = 0;             // the thread that is on the fast path
  std::vector<unsigned long> visitors_;  // on a GPU: the threads whose operators are here
  std::shared_ptr<int> ticket_ = std::make_shared<int>();  // of threads other than the session's own
  VersionFields version;
  OperationFields operation;
  SignatureFields signature;
  OperatorTable operators_;
  Lock lock_;
  Replays replays_;
  Readiness readiness_;
  ListUpdates lists_;
  FirstCalls first_calls_;
  Observation observation_;
  Slot any_reason_, home_, next_tick_, waiting_;
  Signatures signatures_;
  Key key_;
  bool offsets_matter_ = true;
  bool shared_ = false;  // by several threads, whose turns `lock_` is for
  int64_t next_look_ = 0, left_ = 0;
};

}  // namespace dtrrun
