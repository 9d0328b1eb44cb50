// The backend of a session: PyTorch's storages, and operators that are run again (`core/backend.h`).
#pragma once

#include <ATen/record_function.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/profiler/orchestration/observer.h>

#include <optional>

#include "call_notes.h"
#include "placeholders.h"
#include "replays.h"
#include "silence.h"
#include "stored_versions.h"
#include "way_in.h"

namespace dtrrun {

// `Counting`'s, which is defined later. (interposer.cpp)
void wait_for_counted();
void begin_evicting();
void end_evicting();

class SessionBackend final : public PythonBackend {
 public:
  using PythonBackend::PythonBackend;

  // What an open interposer does faster than Python. callbacks: the session's. mask: as for `TensorVersions`.
  struct Native {
    Replays& replays;
    const Device& device;
    PyObject* callbacks;
    Slot next_tick, waiting;  // waiting: how many threads wait for another thread's operator to end
    int64_t mask;
  };
  CallNotes* notes = nullptr;  // of `--where` and `--peak`
  void connect(const Native& native) { native_.emplace(native); }
  void disconnect() { native_.reset(); }
  // Returns the session's device, or null while the interposer is not open.
  const Device* device() const { return native_ ? &native_->device : nullptr; }

  // -- storages --

  bool has_storage(const Version* version) const override { return dtrrun::has_storage(as_stored(version)); }
  StorageRef storage_of(const Version* version) const override {
    const StoredVersion* one = as_stored(version);
    if (one->watch == nullptr) return as_storage(held(one->storage));
    return dtrrun::as_storage(referent(one).get());
  }
  VersionRef version_over(Storage* storage) override {
    if (OwnStorages::can_watch(as_impl(storage))) {
      VersionRef made = new_version<StoredVersion>();
      take_storage(as_stored(made.get()), as_impl(storage));
      return placed(std::move(made), storage);
    }
    return placed(dtrrun::version_over(as_python(storage).ptr(), py::cast(told_by(core().ledger)).ptr()), storage);
  }
  bool is_counted(Storage* storage) const override { return OwnStorages::is_counted(as_impl(storage)); }
  VersionRef successor(Version* version) override {
    const StoredVersion* one = as_stored(version);
    if (one->watch == nullptr) {
      VersionRef made = new_version<StoredVersion>();
      take_storage(as_stored(made.get()), one->storage);
      made->device = version->device;
      return made;
    }
    VersionRef made = dtrrun::version_over(referent(one).get(), py::cast(told_by(core().ledger)).ptr());
    made->device = version->device;
    return made;
  }
  int64_t size_of(Storage* storage) const override {
    if (!native_) return PythonBackend::size_of(storage);
    return rounded(static_cast<int64_t>(as_impl(storage)->nbytes()), native_->mask);
  }
  void empty(Storage* storage) override { dtrrun::empty(as_impl(storage)); }
  void refill(Storage* emptied, Storage* source) override { swap_memory(*as_impl(emptied), *as_impl(source)); }
  bool holds(Storage* storage, int64_t nbytes) const override {
    if (native_) return size_of(storage) == nbytes;
    return call(memory(), "holds", as_python(storage), nbytes).get() == Py_True;
  }

  void died(Version* version) override {
    if (notes != nullptr) notes->died(version);
    PythonBackend::died(version);
  }
  void counting_ended() override { wait_for_counted(); }
  void begin_evicting() override { dtrrun::begin_evicting(); }
  void end_evicting() override { dtrrun::end_evicting(); }
  void room_given_back() override {
    if (!native_ || native_->waiting.number(native_->callbacks) != 0) PythonBackend::room_given_back();
  }

  // -- operations --

  void beneath(void (*function)(void*), void* argument) override {
    // In the traces of PyTorch's profiler. Only where it is on: a thread's first range takes a lock of PyTorch's, which in a
    // forked child may belong to a thread that is not there.
    std::optional<at::RecordFunction> range;
    if (torch::profiler::impl::profilerEnabled()) {
      range.emplace(at::RecordScope::USER_SCOPE);
      if (range->isActive()) range->before("dtrrun: rematerialization");
    }
    if (may_run()) {
      Off off;
      Silent silent;
      c10::InferenceMode no_inference(false);  // as in `runtime.guards.below`, and so is the next line
      c10::impl::ExcludeDispatchKeyGuard beneath_the_program(WayIn::ABOVE);
      function(argument);
      return;
    }
    // In Python, if the program has dispatch modes, or this thread uses another device or stream of a GPU's.
    auto run = [&] { function(argument); };
    call(part("rematerializer"), "beneath", object_in(callable(run)));
  }
  void execute(Run& run) override {
    if (!native_) throw std::logic_error("dtrrun: internal error: the session has ended");
    native_->replays.execute(run);
  }
  void bring(HostCopy& copy, Storage* emptied, int64_t clock) override {
    try {
      return copy.tier->bring(copy, emptied, clock);
    } catch (const c10::OutOfMemoryError&) {
      if (!native_ || native_->device.is_cpu()) throw;
    }
    // Python evicts more, tries again, and raises the budget error in the end.
    auto again = [&] { copy.tier->bring(copy, emptied, clock); };
    call(part("executor"), "bring_back", object_in(callable(again)), copy.nbytes);
  }
  void between() override {
    if (!native_ || now_ns() > native_->next_tick.number(native_->callbacks)) call(part("executor"), "between");
  }

 private:
  // Notes which device a new version is on.
  VersionRef placed(VersionRef made, Storage* storage) const {
    if (native_ && native_->device.are_several())
      made->device = static_cast<uint8_t>(std::max<int64_t>(native_->device.place_of(as_impl(storage)->device()), 0));
    return made;
  }
  bool may_run() const {
    return native_ && c10::impl::TorchDispatchModeTLS::stack_len() == 0 && native_->device.is_bound() &&
           native_->device.is_current() && native_->device.on_main_streams();
  }

  std::optional<Native> native_;
};

// The core of a session, which is notified of its storages' deaths.
struct SessionCore : Core {
  explicit SessionCore(PyObject* ledger)
      : Core(std::make_unique<SessionBackend>(ledger),
             [](Version* one) { let_go(std::exchange(as_stored(one)->storage, nullptr)); }) {}
  Listening listening{ledger};
};

inline SessionBackend& backend_of(Core& core) { return static_cast<SessionBackend&>(*core.backend); }

}  // namespace dtrrun
