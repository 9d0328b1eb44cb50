// Receives operators from the way in, and defines the functions that the extension offers to Python.
//
// When an operator arrives, the program's autograd, autocast, modes and subclasses have done their work, as they would
// without dtrrun. dtrrun enables no mode, so nothing in PyTorch behaves differently. While an operator is handled, the key of
// the way in is off, so operators that the kernel calls do not arrive.
#include "python.h"

#include <atomic>
#include <memory>
#include <unordered_map>

#include "../bindings/core_types.h"
#include "bind_call_notes.h"
#include "compiled_kernels.h"
#include "functions.h"
#include "interposer.h"
#include "pytorch.h"
#include "way_in.h"

namespace dtrrun {
namespace {

std::shared_ptr<Interposer>& interposer = Interposer::current();
std::atomic<bool> is_open{false};

}  // namespace

void arrive(Arrival& arrival) {
  if (is_open) {
    Stopwatch watch;
    watch.is_of(arrival.op);
    if (Counting::own().run(arrival, watch)) return;
    Gil gil;
    if (auto session = interposer) {  // kept alive: another thread may end it while a kernel runs
      session->handle(arrival, gil, watch);
      if (session->recent.is_on) session->recent.add(arrival);
      return;
    }
  }
  if (WayIn::heard != nullptr) WayIn::heard->push_back(c10::toString(arrival.op.operator_name()));
  Off off;
  arrival.run();
}

bool bring_back(const Placeholders::Claim& claim, const std::vector<uintptr_t>& words) {
  auto session = interposer;
  return session && session->touched(claim, words);
}

bool is_session_open() { return is_open; }

void collect_dead() {
  Gil gil;
  if (auto session = interposer) session->collect_dead();
}
void end_counting() {
  Gil gil;
  if (auto session = interposer) session->end_counting();
}
void tick(int64_t now, Stopwatch& watch) {
  Gil gil;
  if (auto session = interposer) session->tick_after(now, watch);
}
void wait_for_counted() { Counting::own().wait(); }
void begin_evicting() { Counting::own().begin_evicting(); }
void end_evicting() { Counting::own().end_evicting(); }
void meet_results(const Arrival& arrival) {
  Gil gil;
  if (auto session = interposer) session->meet_results(arrival);
}

std::optional<c10::DeviceType> device_type_of_session() {
  return interposer ? std::optional(interposer->device.type()) : std::nullopt;
}

std::unique_ptr<Core> make_core(PyObject* ledger) { return std::make_unique<SessionCore>(ledger); }

// -- for Python ------------------------------------------------------------------------------------------

namespace {

std::vector<std::string> heard(const py::function& function) {
  std::vector<std::string> names;
  struct Listening {
    explicit Listening(std::vector<std::string>* names) {
      WayIn::heard = names;
      switch_key(true);
    }
    ~Listening() {
      switch_key(false);
      WayIn::heard = nullptr;
    }
  };
  Listening listening(&names);
  checked(PyObject_CallNoArgs(function.ptr()));
  return names;
}

void open_session(py::handle python, py::handle classes, py::handle placeholder, const std::string& device) {
  if (interposer) throw std::runtime_error("dtrrun: a session is on already");
  if (tensor_slot == nullptr) tensor_slot = Ref::copy(placeholder.ptr()).release();
  Ref former(std::exchange(overwritten_stand_in, attribute(python.ptr(), "overwritten").release()));
  interposer = std::make_shared<Interposer>(python.ptr(), classes.ptr(), device.c_str());
  is_open = true;
  watch_faults();
}

void close_session() {
  is_open = false;
  OwnStorages::present().census.counting = OwnStorages::present().census.backward = false;
  unwatch_faults();
  interposer.reset();
}

void bind_device(int64_t index) {
  if (!interposer) return;
  interposer->bind(static_cast<c10::DeviceIndex>(index));
  if (!interposer->device.is_modelled()) watch_device_allocator(interposer->device.type());
}

void switch_on(bool is_on) {
  // A thread's first operator takes a lock of PyTorch's for a moment. In a process forked at that moment, no new thread could
  // run an operator: so that happens here, where no thread forks (`Threads.entering`).
  if (is_on) at::isRecordFunctionEnabled();
  switch_key(is_on);
}

// Called when a gradient of `leaf` has arrived. By hand, as it is called for each gradient of a backward pass.
PyObject* gradient_arrived(PyObject* otherwise, PyObject* leaf) {
  return guarded([&]() -> PyObject* {
    Stopwatch watch;
    auto session = interposer;
    if (session && is_tensor(leaf)) {
      const at::Tensor& gradient = tensor_of(leaf).grad();
      if (!gradient.defined() || session->pin_gradient(gradient)) return Ref::copy(Py_None).release();
    }
    Stopwatch::Pause pause(watch);
    return PyObject_CallOneArg(otherwise, leaf);
  });
}

Ref gradient_hook(py::handle otherwise) {
  static PyMethodDef arrived = {"gradient_arrived", gradient_arrived, METH_O, "Pins the gradient of a leaf."};
  return checked(PyCFunction_New(&arrived, otherwise.ptr()));
}

// A program has a million objects of a few thousand types.
py::list instances(const py::list& objects, const py::tuple& classes) {
  std::unordered_map<PyTypeObject*, bool> known;
  py::list found;
  for (py::handle one : objects) {
    auto [type, is_new] = known.try_emplace(Py_TYPE(one.ptr()), false);
    if (is_new)
      for (py::handle cls : classes)
        type->second |= PyType_IsSubtype(type->first, reinterpret_cast<PyTypeObject*>(cls.ptr())) != 0;
    if (type->second) found.append(one);
  }
  return found;
}

std::array<int64_t, 5> counters() {
  if (!interposer) return {};
  interposer->add_counted();
  return {interposer->operators_ns, interposer->bookkeeping_ns, interposer->brief_operators_ns, interposer->own_ns(),
          interposer->cold_ns()};
}

template <int64_t OperatorInfo::* counter>
py::object calls() {
  return interposer ? object_in(interposer->calls(counter)) : py::dict();
}

void note_tensors(bool on) {
  if (!interposer) return;
  interposer->recent.is_on = on;
  if (on)
    interposer->end_counting();
  else
    interposer->recent.forget();
}

std::pair<VersionList, int64_t> needed_without(const std::vector<Version*>& constants, int64_t since, bool all) {
  if (!interposer) return {VersionList(), since};
  VersionList found = interposer->needed_without({constants.begin(), constants.end()}, since, all);
  return {std::move(found), interposer->recent.count()};
}

// Calls a function that makes a tensor without an operator, and notes the tensor. By hand: it passes on any arguments.
PyObject* call_and_note(PyObject* function, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    Ref made = checked(PyObject_Vectorcall(function, args, static_cast<size_t>(count), nullptr));
    if (interposer && interposer->recent.is_on && is_tensor(made.get())) interposer->recent.add(tensor_of(made.get()));
    return made.release();
  });
}

Ref noted(py::handle function) {
  static PyMethodDef call = {"noted", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(call_and_note)), METH_FASTCALL,
                             nullptr};
  return checked(PyCFunction_New(&call, function.ptr()));
}

Ref with_state(size_t state, py::handle function, bool own) {
  Restored settings(*reinterpret_cast<const KernelState*>(state));
  Ref found;
  Shortage::Kernel::run(/*locked=*/true, own, [&] { found = checked(PyObject_CallNoArgs(function.ptr())); });
  return found;
}

Ref silently(py::handle function, bool recorded) {
  Silent silent;
  at::RecordFunctionGuard records(recorded && at::isRecordFunctionEnabled());
  return checked(PyObject_CallNoArgs(function.ptr()));
}

// A function of the open session. Without one, it does nothing, or returns false.
template <class Result, class... Args>
struct OfSession {
  Result (*function)(Interposer&, Args...);

  void add(py::module_& module, const char* name, const char* doc) const {
    module.def(
        name,
        [function = function](Args... args) -> Result {
          auto session = interposer;  // kept alive: another thread may end it
          return session ? function(*session, args...) : Result();
        },
        doc);
  }
};

void bind_session(py::module_& module) {
  auto session = [&](const char* name, auto function, const char* doc) { OfSession{+function}.add(module, name, doc); };
  module.def(
      "present_state", [](bool general, bool on_cpu) { return reinterpret_cast<size_t>(KernelState::now(general, on_cpu)); },
      "For tests: the settings that kernels read, as a number that is the same for equal settings.\n\n"
      "general: leave out those that only some kernels read.");
  module.def(
      "with_state", &with_state,
      "For tests: call `function` as a replay's kernel, with these settings. own: whether it is PyTorch's own, which must\n"
      "not go on without memory that it is refused.");
  module.def("silently", &silently,
             "Call `function`, and suppress the warnings of its operators. recorded: whether PyTorch's profiler may see these.");
  module.def(
      "aside",
      [](py::handle function) {
        Shortage::Ignored ignored;
        return silently(function, /*recorded=*/false);
      },
      "Call `function`, whose operators nobody sees, and nothing is evicted for the memory that they are refused.");
  module.def(
      "open_way_in", &WayIn::open,
      "Let the operators of threads arrive that `switch` has switched on, for the lifetime of the process: once in a process.");
  module.def("heard", &heard, "Call `function` without a session, and return the names of the operators that arrive.");
  module.def("open", &open_session, "Begin a session: open(interposer, classes, tensor_slot, device_type).");
  module.def("bind", &bind_device, "Note that a session on a GPU has begun to use the device with this index.");
  module.def("close", &close_session, "End the session.");
  module.def("switch", &switch_on, "Switch on or off whether this thread's operators arrive.");
  module.def("is_on", &is_switched_on, "Return whether this thread's operators arrive.");
  module.def("gradient_hook", &gradient_hook,
             "Return a hook that pins the gradients of leaves. It calls `otherwise` where Python must.");
  module.def("instances", &instances, "Return the objects in a list whose type is one of these classes, or derived from one.");
  session("forget", [](Interposer& one) { one.forget(); }, "Forget all signatures.");
  session(
      "count_only", [](Interposer& one, int64_t share, bool backward) { one.count_only(share, backward); },
      "Between two steps: only count operators from now on, if memory is ample: tensors take at most one in `share` bytes of\n"
      "the limit. backward: otherwise, those of backward passes that make little.");
  session(
      "adopt_counted", [](Interposer& one, py::handle tensors) { one.adopt_counted(tensors.ptr()); },
      "Enter those in a list, and the gradients of those, that have only been counted.");
  session(
      "stay", [](Interposer& one, py::handle tensors) { return one.stay(tensors.ptr()); },
      "Return whether the tensors in a list stay in memory without a lock, because operators are only counted.");
  module.def(
      "counters", [] { return py::tuple(py::cast(counters())); },
      "Return ns: in operators, of bookkeeping, and what was sampled (`Stopwatch`): in operators, our own, cold.");
  module.def("python_calls", &calls<&OperatorInfo::python_calls>,
             "Return how often Python was asked about each call of an operator, by name.");
  module.def("native_calls", &calls<&OperatorInfo::native_calls>, "Return how often each operator was handled without, by name.");
  module.def("list_calls", &calls<&OperatorInfo::list_calls>,
             "For tests: return how often each operator was handled by `lists.h`, by name.");
  session(
      "tells_of_blocks", [](Interposer& one) { return DeviceAllocator::tells_of_blocks(one.device.type()); },
      "Return whether the GPU's allocator tells of the blocks that it hands out. If so, it does from now on.");
  module.def("note_tensors", &note_tensors, "Note each tensor that an operator makes from now on, or forget them.");
  session(
      "note_wrapper",
      [](Interposer& one, py::handle tensor, const py::str& inner) {
        if (is_tensor(tensor.ptr())) one.recent.add_wrapper(tensor_of(tensor.ptr()), inner.ptr());
      },
      "Note a tensor that refers to another, which is its attribute `inner`.");
  module.def("needed_without", &needed_without,
             "Return the versions that would be recomputed from these constants, of tensors noted since then that somebody but\n"
             "autograd's graph holds, or of all; and the number for the next `since`.");
  module.def("noted", &noted, "Return a function that calls this one, and notes the tensor that it makes.");
  session(
      "read_times", [](Interposer& one) { one.measuring().poll(); },
      "Read what first calls on a GPU have taken, as far as it is known.");
  session(
      "settle", [](Interposer& one) { return one.settle(); },
      "Move memory that is back to the address that was touched. Returns False if the system has no memory.");
  session("share", [](Interposer& one) { one.share(); }, "Let several threads take turns. None may be in an operator now.");
  session(
      "leave_turn", [](Interposer& one) { return one.leave(); },
      "Give up this thread's turn, as code of the program is about to run. Returns whether it had no lock.");
  module.def(
      "rejoin_turn",
      [] {
        auto session = interposer;
        return !session || session->rejoin();
      },
      "Return there, with the lock if others need it. False: call it again.");
  session("relearn", [](Interposer& one) { one.relearn(); }, "Forget what is known about operators.");
  session(
      "is_inside", [](Interposer& one) { return one.is_inside(); },
      "Return whether another thread is in an operator without a lock.");
}

// By hand, since generated code calls them often.
PyMethodDef fast_functions[] = {
    {"compiled_kernel", CompiledKernel::make, METH_VARARGS,
     "compiled_kernel(name, kernel, plain, arguments): return a function that replaces a kernel generated by torch.compile.\n"
     "kernel: called by an operator; plain: called without a session. arguments: a letter for each: r and w for a tensor\n"
     "that it reads or writes, i and f for a number."},
    {"empty_strided_cpu", empty_strided<c10::DeviceType::CPU>, METH_VARARGS,
     "empty_strided_cpu(size, stride, dtype): run as an operator."},
    {"empty_strided_cuda", empty_strided<c10::DeviceType::CUDA>, METH_VARARGS,
     "empty_strided_cuda(size, stride, dtype): run as an operator."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace
}  // namespace dtrrun

PYBIND11_MODULE(_dtrrun_native, module) {
  using namespace dtrrun;
  storages = {[](Storage* one) { ImplRef::reclaim_copy(as_impl(one)).release(); },
              [](Storage* one) { ImplRef::reclaim(as_impl(one)); }};
  count_nodes();
  storage_object = [](Storage* one) { return object_of(as_torch(StorageRef::copy(one))).release(); };
  storage_in = [](PyObject* object) {
    if (!is_storage(object)) throw c10::TypeError({__func__, __FILE__, 0}, "a storage is wanted");
    return as_storage(storage_of(object).unsafeGetStorageImpl());
  };
  settle_deaths = tell_deaths;
  program_has = [](const VersionObject* one) { return has_storage(static_cast<const StoredVersion*>(one)); };
  CompiledKernel::type = CompiledKernel::make_type();
  if (CompiledKernel::type == nullptr || PyModule_AddType(module.ptr(), CompiledKernel::type) < 0) raise();
  if (PyModule_AddFunctions(module.ptr(), fast_functions) < 0) raise();
  translate_errors();
  add_core_types(module, "_dtrrun_native", {sizeof(StoredVersion), make_version, call_version});
  bind_observed_call(module);
  bind_call_notes(module);
  bind_session(module);
  bind_memory(module);
  bind_foreign(module);
  bind_turn_lock(module);
}
