// Receives operators from the way in, and defines the functions that the extension offers to Python.
//
// When an operator arrives, the program's autograd, autocast, modes and subclasses have done their work, as they would
// without dtrrun. dtrrun enables no mode, so nothing in PyTorch behaves differently. While an operator is handled, the key of
// the way in is off, so operators that the kernel calls do not arrive.
#include "python.h"

#include <torch/csrc/autograd/python_variable.h>

#include <atomic>
#include <memory>

#include "compiled_kernels.h"
#include "device_allocator.h"
#include "dlpack.h"
#include "dynamo_guards.h"
#include "entries.h"
#include "interposer.h"
#include "extension_functions.h"
#include "faults.h"
#include "heap.h"
#include "pytorch.h"
#include "registrations.h"
#include "way_in.h"

namespace dtrrun {
namespace {

std::shared_ptr<Interposer>& interposer = Interposer::current();
std::atomic<bool> is_open{false};

}  // namespace

void arrive(Arrival& arrival) {
  if (is_open) {
    Stopwatch watch;
    Gil gil;
    if (auto session = interposer) {  // kept alive: another thread may end it while a kernel runs
      session->handle(arrival, gil, watch);
      return;
    }
  }
  if (WayIn::heard != nullptr) WayIn::heard->push_back(c10::toString(arrival.op.operator_name()));
  Off off;
  arrival.run();
}

namespace {

bool bring_back(const Placeholders::Claim& claim, const std::vector<uintptr_t>& words) {
  auto session = interposer;
  return session && session->touched(claim, words);
}

// -- for Python ------------------------------------------------------------------------------------------

PyObject* open_way_in(PyObject*, PyObject*) {
  return guarded([]() -> PyObject* {
    WayIn::open();
    Py_RETURN_NONE;
  });
}

PyObject* heard(PyObject*, PyObject* function) {
  return guarded([&]() -> PyObject* {
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
    {
      Listening listening(&names);
      checked(PyObject_CallNoArgs(function));
    }
    Ref list = checked(PyList_New(0));
    for (const std::string& name : names)
      if (PyList_Append(list.get(), checked(PyUnicode_FromString(name.c_str())).get()) < 0) raise();
    return list.release();
  });
}

PyObject* open_session(PyObject*, PyObject* args) {
  PyObject *python, *handle, *classes, *placeholder;
  const char* device;
  if (!PyArg_ParseTuple(args, "OOOOs", &python, &handle, &classes, &placeholder, &device)) return nullptr;
  return guarded([&]() -> PyObject* {
    if (interposer) throw std::runtime_error("dtrrun: a session is on already");
    Py_INCREF(placeholder);
    tensor_slot = placeholder;
    overwritten_stand_in = attribute(python, "overwritten").release();
    interposer = std::make_shared<Interposer>(python, handle, classes, device);
    is_open = true;
    Faults::watch(&bring_back);
    Py_RETURN_NONE;
  });
}

PyObject* close_session(PyObject*, PyObject*) {
  is_open = false;
  Faults::unwatch();
  interposer.reset();
  Py_RETURN_NONE;
}

PyObject* bind(PyObject*, PyObject* index) {
  return guarded([&]() -> PyObject* {
    if (interposer) {
      interposer->device.bind(static_cast<c10::DeviceIndex>(as_number(index)));
      DeviceAllocator::watch(interposer->device.type());
    }
    Py_RETURN_NONE;
  });
}

PyObject* switch_on(PyObject*, PyObject* on) {
  // A thread's first operator takes a lock of PyTorch's for a moment. In a process forked at that moment, no new thread could
  // run an operator: so that happens here, where no thread forks (`Threads.entering`).
  bool is_on = PyObject_IsTrue(on);
  if (is_on) at::isRecordFunctionEnabled();
  switch_key(is_on);
  Py_RETURN_NONE;
}

PyObject* hide_from_guards(PyObject*, PyObject* on) {
  return guarded([&]() -> PyObject* {
    DynamoGuards::watch(PyObject_IsTrue(on));
    Py_RETURN_NONE;
  });
}

PyObject* is_on(PyObject*, PyObject*) { return PyBool_FromLong(is_switched_on()); }

// Runs the kernel of the operator that Python is handling in this thread, as it would run without dtrrun.
PyObject* proceed(PyObject*, PyObject*) {
  return guarded([]() -> PyObject* {
    if (underway == nullptr) throw std::runtime_error("dtrrun: no operator is under way");
    Underway& call = *underway;
    call.results = call.arrival->copied();
    {
      c10::impl::ForceDispatchKeyGuard program(call.program);
      WithoutGil released;
      Shortage::Kernel::run(/*locked=*/true, /*own=*/true, [&] {
        call.arrival->op.redispatchBoxed(call.arrival->keys & WayIn::BELOW, &call.results);
      });
    }
    call.done = true;
    return shown_results(call.results).release();
  });
}

// `proceed` for an operator that is not PyTorch's own. Returns its results, whether it has read anything of the session besides
// its arguments, and which tensors it has kept.
PyObject* proceed_watched(PyObject*, PyObject* args) {
  PyObject* touch;
  int counts;
  if (!PyArg_ParseTuple(args, "Op", &touch, &counts)) return nullptr;
  return guarded([&]() -> PyObject* {
    if (underway == nullptr) throw std::runtime_error("dtrrun: no operator is under way");
    Underway& call = *underway;
    std::optional<KeptTensors> keeping;
    if (counts) keeping.emplace(call.arrival->values(), call.arrival->count);
    Stack& stack = call.results;
    stack = call.arrival->copied();
    bool reads_unseen;
    {
      Body body(touch, call.arrival->values(), call.arrival->count);
      auto seen = call.program;
      seen.excluded_ = seen.excluded_ - WayIn::OWN;
      c10::impl::ForceDispatchKeyGuard program(seen);
      WithoutGil released;
      Shortage::Kernel::run(/*locked=*/true, /*own=*/false, [&] {
        call.arrival->op.redispatchBoxed(call.arrival->keys & WayIn::BELOW, &stack);
      });
      reads_unseen = body.reads_unseen(stack);
    }
    call.done = true;
    Ref kept = checked(PyList_New(0));
    if (keeping)
      for (const at::Tensor& tensor : keeping->kept(stack))
        if (PyList_Append(kept.get(), to_python(shown(tensor), Enumeration::TENSOR).get()) < 0) raise();
    return Py_BuildValue("(NOO)", shown_results(stack).release(), reads_unseen ? Py_True : Py_False,
                         kept.get());
  });
}

PyObject* known_signature(PyObject*, PyObject*) {
  return guarded([]() -> PyObject* {
    auto session = interposer;
    Ref found = session && underway != nullptr ? session->known_signature(*underway) : Ref();
    return found ? found.release() : Ref::copy(Py_None).release();
  });
}

PyObject* predicted(PyObject*, PyObject*) {
  return guarded([]() -> PyObject* {
    auto session = interposer;
    auto found = session && underway != nullptr ? session->predicted(*underway) : std::nullopt;
    return found ? PyLong_FromLongLong(*found) : Ref::copy(Py_None).release();
  });
}

// Called when Python is about to run the operator's kernel.
PyObject* begins(PyObject*, PyObject* started) {
  return guarded([&] {
    if (underway != nullptr) underway->time.emplace(true, as_number(started));
    return Ref::copy(Py_None).release();
  });
}

PyObject* own_ns(PyObject*, PyObject* ns) {
  return guarded([&]() -> PyObject* {
    if (underway == nullptr || !underway->time) return Ref::copy(ns).release();
    return PyLong_FromLongLong(underway->time->of(as_number(ns)));
  });
}

// Returns true if a tensor of the operator that Python is handling in this thread stands for a number, but Python got a tensor.
PyObject* has_numbers(PyObject*, PyObject*) {
  auto session = interposer;
  return PyBool_FromLong(session && underway != nullptr && session->has_numbers(*underway));
}

// Lets calls like the one that Python is handling in this thread take the fast path.
PyObject* remember(PyObject*, PyObject* signature) {
  if (underway != nullptr) underway->signature = Ref::copy(signature);
  Py_RETURN_NONE;
}

// Returns true if this dispatch key was excluded when the operator that Python is handling in this thread was called.
PyObject* was_excluded(PyObject*, PyObject* name) {
  const char* text = PyUnicode_AsUTF8(name);
  if (text == nullptr) return nullptr;
  return guarded([&]() -> PyObject* {
    return PyBool_FromLong(underway != nullptr && underway->program.excluded_.has(c10::parseDispatchKey(text)));
  });
}

// Called when a gradient of `leaf` has arrived.
PyObject* gradient_arrived(PyObject* otherwise, PyObject* leaf) {
  return guarded([&]() -> PyObject* {
    Stopwatch watch;
    auto session = interposer;
    if (session && THPVariable_Check(leaf)) {
      const at::Tensor& gradient = THPVariable_Unpack(leaf).grad();
      if (!gradient.defined() || session->pin_gradient(gradient)) return Ref::copy(Py_None).release();
    }
    Stopwatch::Pause pause(watch);
    return PyObject_CallOneArg(otherwise, leaf);
  });
}

PyObject* gradient_hook(PyObject*, PyObject* otherwise) {
  static PyMethodDef arrived = {"gradient_arrived", gradient_arrived, METH_O, "Pins the gradient of a leaf."};
  return PyCFunction_New(&arrived, otherwise);
}

PyObject* forget(PyObject*, PyObject*) {
  if (interposer) interposer->forget();
  Py_RETURN_NONE;
}

PyObject* counters(PyObject*, PyObject*) {
  if (!interposer) return Py_BuildValue("(iiiii)", 0, 0, 0, 0, 0);
  return Py_BuildValue("(LLLLL)", static_cast<long long>(interposer->operators_ns),
                       static_cast<long long>(interposer->bookkeeping_ns),
                       static_cast<long long>(interposer->brief_operators_ns), static_cast<long long>(interposer->own_ns()),
                       static_cast<long long>(interposer->cold_ns()));
}

template <int64_t OperatorInfo::*counter>
PyObject* calls(PyObject*, PyObject*) {
  return guarded([]() -> PyObject* { return !interposer ? PyDict_New() : interposer->calls(counter).release(); });
}

PyObject* living(PyObject*, PyObject*) {
  return Py_BuildValue("(LL)", static_cast<long long>(living_versions), static_cast<long long>(living_operations));
}

PyObject* key_of_storage(PyObject*, PyObject* storage) { return PyLong_FromLongLong(key_of(storage)); }

PyObject* storage_of_tensor(PyObject*, PyObject* tensor) {
  return guarded([&]() -> PyObject* {
    if (!THPVariable_Check(tensor)) throw c10::TypeError({__func__, __FILE__, 0}, "a tensor is wanted");
    return object_of(THPVariable_Unpack(tensor).storage()).release();
  });
}

PyObject* use_heap(PyObject*, PyObject* on) {
  if (PyObject_IsTrue(on)) return PyBool_FromLong(Heap::own().install());
  Heap::own().remove();
  Py_RETURN_TRUE;
}

PyObject* cap_heap(PyObject*, PyObject* nbytes) {
  Heap::own().set_cap(nbytes == Py_None ? SIZE_MAX : as_number(nbytes));
  Py_RETURN_NONE;
}

PyObject* heap_figures(PyObject*, PyObject*) {
  Arena::Figures of = Heap::own().figures();
  return Py_BuildValue("(nnnn)", of.taken, of.warm, of.cleared, of.returned);
}

PyObject* heap_most(PyObject*, PyObject*) { return PyLong_FromSize_t(Heap::own().most()); }

PyObject* ask_for_room(PyObject*, PyObject* ask) {
  Outside::own().listen(ask == Py_None ? nullptr : ask);
  Py_RETURN_NONE;
}

PyObject* on_shortage(PyObject*, PyObject* release) {
  Shortage::own().listen(release == Py_None ? nullptr : release);
  Py_RETURN_NONE;
}

PyObject* before_flush(PyObject*, PyObject* avoid) {
  Shortage::own().listen_before_flush(avoid == Py_None ? nullptr : avoid);
  Py_RETURN_NONE;
}

PyObject* follow_blocks(PyObject*, PyObject* args) {
  int device, devices;
  if (!PyArg_ParseTuple(args, "ii", &device, &devices)) return nullptr;
  return guarded([&]() -> PyObject* {
    if (!interposer || !DeviceAllocator::tells_of_blocks(interposer->device.type())) Py_RETURN_FALSE;
    DeviceBlocks::own().prepare(device, devices);
    Py_RETURN_TRUE;
  });
}

PyObject* start_blocks(PyObject*, PyObject* snapshot) {
  return guarded([&]() -> PyObject* {
    std::vector<std::pair<DeviceBlocks::Segment, std::vector<DeviceBlocks::Block>>> segments;
    for (PyObject* item : Items(snapshot)) {
      Py_ssize_t address, nbytes;
      int small, expandable, ours;
      PyObject* blocks;
      if (!PyArg_ParseTuple(item, "nnpppO", &address, &nbytes, &small, &expandable, &ours, &blocks)) return nullptr;
      DeviceBlocks::Segment segment{static_cast<uintptr_t>(address), static_cast<size_t>(nbytes), small != 0, expandable != 0, ours != 0};
      segments.emplace_back(segment, std::vector<DeviceBlocks::Block>());
      for (PyObject* one : Items(blocks)) {
        Py_ssize_t requested;
        int free;
        if (!PyArg_ParseTuple(one, "nnnp", &address, &nbytes, &requested, &free)) return nullptr;
        segments.back().second.push_back(
            {static_cast<uintptr_t>(address), static_cast<size_t>(nbytes), static_cast<size_t>(requested), free != 0});
      }
    }
    return PyBool_FromLong(DeviceBlocks::own().start(segments));
  });
}

PyObject* leave_blocks(PyObject*, PyObject*) {
  DeviceBlocks::own().stop();
  Py_RETURN_NONE;
}

PyObject* segment_bytes(PyObject*, PyObject*) { return PyLong_FromSize_t(DeviceBlocks::own().reserved_bytes()); }

PyObject* returnable_bytes(PyObject*, PyObject*) { return PyLong_FromSize_t(DeviceBlocks::own().returnable_bytes()); }

PyObject* blocks_serving(PyObject*, PyObject* nbytes) {
  return guarded([&] {
    Ref found = checked(PyList_New(0)), segment = checked(PyList_New(0));
    for (const DeviceBlock& one : DeviceBlocks::own().serving(as_number(nbytes))) {
      if (one.nbytes == 0) {
        if (PyList_Append(found.get(), segment.get()) < 0) raise();
        segment = checked(PyList_New(0));
      } else {
        Ref block = checked(Py_BuildValue("(nnO)", one.address, one.nbytes, one.free ? Py_True : Py_False));
        if (PyList_Append(segment.get(), block.get()) < 0) raise();
      }
    }
    return found.release();
  });
}

PyObject* evict_window(PyObject*, PyObject* args) {
  PyObject *ledger, *segments;
  long long wanted, at_most;
  if (!PyArg_ParseTuple(args, "OOLL", &ledger, &segments, &wanted, &at_most)) return nullptr;
  return guarded([&]() -> PyObject* {
    BlockList blocks;
    if (segments == Py_None) {
      blocks = DeviceBlocks::own().serving(wanted);
    } else {
      for (PyObject* segment : Items(segments)) {
        for (PyObject* one : Items(segment)) {
          Py_ssize_t address, nbytes;
          int free;
          if (!PyArg_ParseTuple(one, "nnp", &address, &nbytes, &free)) return nullptr;
          blocks.push_back({static_cast<uintptr_t>(address), static_cast<size_t>(nbytes), free != 0});
        }
        blocks.push_back({0, 0, false});
      }
    }
    return PyBool_FromLong(evict_window(core_of(ledger), std::move(blocks), wanted, at_most));
  });
}

PyObject* outside(PyObject*, PyObject*) { return PyLong_FromSize_t(Outside::own().nbytes()); }

PyObject* met_outside(PyObject*, PyObject* storage) {
  return guarded([&]() -> PyObject* {
    if (!THPStorage_Check(storage)) return PyLong_FromLong(0);
    THPStorage_assertNotNull(storage);
    return PyLong_FromSize_t(Outside::own().leave(THPStorage_Unpack(storage).data()));
  });
}

PyObject* swap(PyObject*, PyObject* args) {
  PyObject *one, *other;
  if (!PyArg_ParseTuple(args, "O!O!", &THPStorageType, &one, &THPStorageType, &other)) return nullptr;
  return guarded([&]() -> PyObject* {
    THPStorage_assertNotNull(one);
    THPStorage_assertNotNull(other);
    swap_memory(*THPStorage_Unpack(one).unsafeGetStorageImpl(), *THPStorage_Unpack(other).unsafeGetStorageImpl());
    Py_RETURN_NONE;
  });
}

PyObject* evict(PyObject*, PyObject* storage) {
  return guarded([&]() -> PyObject* {
    THPStorage_assertNotNull(storage);
    empty(THPStorage_Unpack(storage).unsafeGetStorageImpl());
    Py_RETURN_NONE;
  });
}

PyObject* is_evicted(PyObject*, PyObject* storage) {
  return guarded([&]() -> PyObject* {
    THPStorage_assertNotNull(storage);
    return PyBool_FromLong(is_empty(THPStorage_Unpack(storage).unsafeGetStorageImpl()));
  });
}

PyObject* is_for_shapes_only(PyObject*, PyObject* storage) {
  return guarded([&]() -> PyObject* {
    THPStorage_assertNotNull(storage);
    return PyBool_FromLong(is_for_shapes(THPStorage_Unpack(storage).unsafeGetStorageImpl()));
  });
}

PyObject* settle(PyObject*, PyObject*) {
  return guarded([]() -> PyObject* {
    auto session = interposer;
    return PyBool_FromLong(session && session->settle());
  });
}

PyObject* watch_faults(PyObject*, PyObject*) {
  if (is_open) Faults::watch(&bring_back);
  Py_RETURN_NONE;
}

PyObject* spoil_evicted(PyObject*, PyObject* on) {
  spoils_evicted = PyObject_IsTrue(on);
  Py_RETURN_NONE;
}

PyObject* faults(PyObject*, PyObject*) { return PyLong_FromLongLong(Faults::count()); }

PyObject* watch_registrations(PyObject*, PyObject* callback) {
  return guarded([&]() -> PyObject* {
    Registrations::watch(callback);
    Py_RETURN_NONE;
  });
}

PyObject* watch_functions(PyObject*, PyObject* call) {
  ExtensionFunctions::watch(call);
  Py_RETURN_NONE;
}

PyObject* meet_functions(PyObject*, PyObject* functions) {
  return guarded([&]() -> PyObject* {
    ExtensionFunctions::meet(checked(PySequence_Fast(functions, "functions must be a sequence")).get());
    Py_RETURN_NONE;
  });
}

PyObject* foreign_paths(PyObject*, PyObject*) {
  return guarded([]() -> PyObject* {
    Ref paths = checked(PyList_New(0));
    for (const std::string& path : ForeignCode::own().paths())
      if (PyList_Append(paths.get(), checked(PyUnicode_DecodeFSDefault(path.c_str())).get()) < 0) raise();
    return paths.release();
  });
}

// A hash of the content of a storage in host memory.
PyObject* checksum(PyObject*, PyObject* storage) {
  return guarded([&]() -> PyObject* {
    THPStorage_assertNotNull(storage);
    c10::Storage kept = THPStorage_Unpack(storage);
    size_t nbytes = kept.nbytes();
    const auto* from = static_cast<const char*>(kept.data());
    constexpr size_t LANES = 8, AT_ONCE = LANES * sizeof(uint64_t);
    constexpr uint64_t ODD = 0x9E3779B97F4A7C15ull;
    uint64_t lanes[LANES] = {};
    auto mix = [&](const char* place, size_t count) {
      uint64_t words[LANES] = {};
      std::memcpy(words, place, count);
      for (size_t i = 0; i < LANES; i++) {
        uint64_t mixed = lanes[i] ^ words[i];
        lanes[i] = ((mixed << 29) | (mixed >> 35)) * ODD;  // rotated, so that every bit affects more than one
      }
    };
    {
      WithoutGil released;
      size_t done = 0;
      for (; done + AT_ONCE <= nbytes; done += AT_ONCE) mix(from + done, AT_ONCE);
      mix(from + done, nbytes - done);
    }
    uint64_t all = nbytes;
    for (uint64_t lane : lanes) all = (all ^ lane ^ (all >> 31)) * ODD;
    return PyLong_FromUnsignedLongLong(all);
  });
}

PyObject* guard_exports(PyObject*, PyObject* args) {
  PyObject *capsule, *reach;
  if (!PyArg_ParseTuple(args, "OO", &capsule, &reach)) return nullptr;
  return guarded([&] { return Exports::guard(capsule, reach); });
}

PyObject* share(PyObject*, PyObject*) {
  if (interposer) interposer->share();
  Py_RETURN_NONE;
}

PyObject* leave_turn(PyObject*, PyObject*) { return PyBool_FromLong(interposer && interposer->leave()); }

PyObject* rejoin_turn(PyObject*, PyObject*) {
  return guarded([]() -> PyObject* {
    auto session = interposer;
    return PyBool_FromLong(!session || session->rejoin());
  });
}

PyObject* relearn(PyObject*, PyObject*) {
  if (interposer) interposer->relearn();
  Py_RETURN_NONE;
}

PyObject* is_inside(PyObject*, PyObject*) { return PyBool_FromLong(interposer && interposer->is_inside()); }

PyObject* present_state(PyObject*, PyObject* args) {
  int general, on_cpu;
  if (!PyArg_ParseTuple(args, "pp", &general, &on_cpu)) return nullptr;
  return guarded([&] { return PyLong_FromVoidPtr(const_cast<KernelState*>(KernelState::now(general != 0, on_cpu != 0))); });
}

PyObject* changes_others(PyObject*, PyObject* state) {
  return guarded([&] { return PyBool_FromLong(static_cast<const KernelState*>(PyLong_AsVoidPtr(state))->changes_others()); });
}

PyObject* with_state(PyObject*, PyObject* args) {
  PyObject *state, *function;
  int own;
  if (!PyArg_ParseTuple(args, "O!Op", &PyLong_Type, &state, &function, &own)) return nullptr;
  return guarded([&] {
    Restored settings(*static_cast<const KernelState*>(PyLong_AsVoidPtr(state)));
    Ref found;
    Shortage::Kernel::run(/*locked=*/true, own, [&] { found = checked(PyObject_CallNoArgs(function)); });
    return found.release();
  });
}

PyObject* run_silently(PyObject* function, bool recorded) {
  Silent silent;
  at::RecordFunctionGuard records(recorded && at::isRecordFunctionEnabled());
  return checked(PyObject_CallNoArgs(function)).release();
}

PyObject* silently(PyObject*, PyObject* args) {
  PyObject* function;
  int recorded;
  if (!PyArg_ParseTuple(args, "Op", &function, &recorded)) return nullptr;
  return guarded([&] { return run_silently(function, recorded != 0); });
}

PyObject* aside(PyObject*, PyObject* function) {
  return guarded([&] {
    Shortage::Ignored ignored;
    return run_silently(function, /*recorded=*/false);
  });
}

PyMethodDef methods[] = {
    {"present_state", present_state, METH_VARARGS,
     "present_state(general, on_cpu): the settings that kernels read, as a number that is the same for equal settings.\n"
     "general: leave out those that only some kernels read."},
    {"with_state", with_state, METH_VARARGS,
     "with_state(state, function, own): replay an operator: call `function` with these settings, and restore the present ones.\n"
     "own: whether the operator is PyTorch's own, which must not go on without memory that it is refused."},
    {"changes_others", changes_others, METH_O,
     "changes_others(state): return whether calling a function with these settings would change those of other threads."},
    {"silently", silently, METH_VARARGS,
     "silently(function, recorded): call `function`, and suppress the warnings of its operators. recorded: whether PyTorch's\n"
     "profiler may see these."},
    {"aside", aside, METH_O,
     "aside(function): call `function`, whose operators nobody sees, and nothing is evicted for the memory that they are refused."},
    {"compiled_kernel", CompiledKernel::make, METH_VARARGS,
     "compiled_kernel(name, kernel, plain, arguments): return a function that replaces a kernel generated by torch.compile.\n"
     "kernel: called by an operator; plain: called without a session. arguments: a letter for each: r and w for a tensor\n"
     "that it reads or writes, i and f for a number."},
    {"empty_strided_cpu", empty_strided<c10::DeviceType::CPU>, METH_VARARGS,
     "empty_strided_cpu(size, stride, dtype): run as an operator."},
    {"empty_strided_cuda", empty_strided<c10::DeviceType::CUDA>, METH_VARARGS,
     "empty_strided_cuda(size, stride, dtype): run as an operator."},
    {"open_way_in", open_way_in, METH_NOARGS,
     "Let the operators of threads arrive that `switch` has switched on, for the lifetime of the process: once in a process."},
    {"heard", heard, METH_O, "heard(function): call `function` without a session, and return the names of the operators that arrive."},
    {"open", open_session, METH_VARARGS, "Begin a session: open(interposer, handle, classes, tensor_slot, device_type)."},
    {"bind", bind, METH_O, "Note that a session on a GPU has begun to use the device with this index."},
    {"close", close_session, METH_NOARGS, "End the session."},
    {"switch", switch_on, METH_O, "Switch on or off whether this thread's operators arrive."},
    {"hide_from_guards", hide_from_guards, METH_O, "Hide our key from Dynamo's guards while they are checked, or stop doing so."},
    {"is_on", is_on, METH_NOARGS, "Return whether this thread's operators arrive."},
    {"proceed", proceed, METH_NOARGS, "Run the kernel of the operator being handled in this thread."},
    {"proceed_watched", proceed_watched, METH_VARARGS,
     "proceed_watched(touch, counts): the same for an operator that is not PyTorch's: (results, reads unseen, kept)."},
    {"known_signature", known_signature, METH_NOARGS, "Return the signature of the operator being handled, if it is known here."},
    {"predicted", predicted, METH_NOARGS,
     "Return the bytes that the operator being handled will allocate, or None if no formula predicts them."},
    {"begins", begins, METH_O, "begins(started): the kernel of the operator being handled begins now, in ns of `perf_counter_ns`."},
    {"own_ns", own_ns, METH_O, "own_ns(ns): return these ns since then, without those in which this thread was descheduled."},
    {"remember", remember, METH_O, "Let later calls like the operator being handled take the fast path, with this signature."},
    {"has_numbers", has_numbers, METH_NOARGS, "Return whether a tensor argument of that operator stands for a number."},
    {"was_excluded", was_excluded, METH_O, "Return whether a dispatch key was excluded when that operator was called."},
    {"gradient_hook", gradient_hook, METH_O,
     "gradient_hook(otherwise): return a hook that pins the gradients of leaves. It calls `otherwise` where Python must."},
    {"forget", forget, METH_NOARGS, "Forget all signatures."},
    {"counters", counters, METH_NOARGS,
     "Return ns of the fast path: in operators, of bookkeeping, and what was sampled (`Stopwatch`): in operators, our own, cold."},
    {"python_calls", calls<&OperatorInfo::python_calls>, METH_NOARGS,
     "Return how often each operator was handled in Python, by name."},
    {"native_calls", calls<&OperatorInfo::native_calls>, METH_NOARGS,
     "Return how often each operator was handled natively, by name."},
    {"living", living, METH_NOARGS,
     "Return the numbers of (versions, operations) that exist, which the garbage collector does not know."},
    {"storage_of", storage_of_tensor, METH_O, "Return a tensor's storage, as an object that PyTorch does not know of."},
    {"swap", swap, METH_VARARGS, "swap(storage, storage): swap what they hold."},
    {"evict", evict, METH_O, "Release a storage's memory. `Interposer.touched` is called when code touches it from now on."},
    {"is_evicted", is_evicted, METH_O, "Return whether a storage is evicted."},
    {"is_for_shapes", is_for_shapes_only, METH_O, "Return whether a storage has never had memory: it is there for shapes only."},
    {"settle", settle, METH_NOARGS,
     "Move memory that is back to the address that was touched. Returns False if the system has no memory."},
    {"watch_functions", watch_functions, METH_O,
     "watch_functions(call): call `call(function, args, kwargs)` instead of functions of extensions that use PyTorch;\n"
     "None: stop."},
    {"meet_functions", meet_functions, METH_O, "Watch those of these functions whose code is such an extension's."},
    {"foreign_paths", foreign_paths, METH_NOARGS, "Return the paths of the libraries that use PyTorch and are not part of it."},
    {"checksum", checksum, METH_O, "Return a hash of the content of a storage in host memory."},
    {"watch_faults", watch_faults, METH_NOARGS, "Make sure that our fault handler is still the first."},
    {"spoil_evicted", spoil_evicted, METH_O, "For tests: overwrite what is evicted, or stop doing so."},
    {"faults", faults, METH_NOARGS, "Return how often code other than operators has touched an evicted storage in this process."},
    {"key_of", key_of_storage, METH_O, "Return the key of a storage's versions."},
    {"use_heap", use_heap, METH_O,
     "Allocate tensors from our heap, or stop. Returns False if PyTorch has been given another allocator."},
    {"cap_heap", cap_heap, METH_O, "Limit the bytes that the heap's blocks and free pages may take; None: no limit."},
    {"heap_figures", heap_figures, METH_NOARGS,
     "Return the heap's bytes: (of blocks, of free pages, cleared by the system, returned to it)."},
    {"watch_registrations", watch_registrations, METH_O,
     "Call a function with the names of the operators that exist, and of those registered later; None: stop."},
    {"heap_most", heap_most, METH_NOARGS, "Return the most bytes of blocks at once since the last call."},
    {"ask_for_room", ask_for_room, METH_O,
     "Call a function with the bytes of each block that is about to be allocated outside of an operator; None: stop."},
    {"on_shortage", on_shortage, METH_O,
     "Call a function with the bytes of a block that the system refuses and the number of the attempt; None: stop."},
    {"before_flush", before_flush, METH_O,
     "Call a function with the bytes of a request for which a GPU's allocator has no cached block, before it flushes; None: stop."},
    {"follow_blocks", follow_blocks, METH_VARARGS,
     "follow_blocks(index, count): let a GPU's allocator tell of its blocks on one of so many devices. Returns False if it\n"
     "can't. A snapshot must follow."},
    {"start_blocks", start_blocks, METH_O,
     "Take over that snapshot, a list of (address, bytes, is small, is expandable, is ours, blocks), each with blocks (address,\n"
     "bytes, requested bytes, is free). Returns False if the blocks can't be followed."},
    {"leave_blocks", leave_blocks, METH_NOARGS, "Stop following blocks."},
    {"segment_bytes", segment_bytes, METH_NOARGS, "Return the bytes of all segments, as far as followed."},
    {"returnable_bytes", returnable_bytes, METH_NOARGS,
     "Return the bytes of followed pages that the allocator would return to the driver if it flushed."},
    {"blocks_serving", blocks_serving, METH_O,
     "For tests: return the followed segments that can serve a request of that size, lists of (address, bytes, is free)."},
    {"evict_window", evict_window, METH_VARARGS,
     "evict_window(ledger, segments, wanted, at_most): evict the cheapest window of neighbouring blocks for `wanted` contiguous\n"
     "bytes, unless computing them again costs more than `at_most` ns (-1: whatever it costs). segments: lists of (address,\n"
     "bytes, is free); None: those that are followed. Returns whether that was possible."},
    {"outside", outside, METH_NOARGS, "Return the bytes of such blocks that no version accounts for."},
    {"met_outside", met_outside, METH_O,
     "Note that a version accounts for this storage. Returns the bytes that it had among those."},
    {"guard_exports", guard_exports, METH_VARARGS,
     "guard_exports(capsule, reach): let DLPack's table call reach(tensor) before it exports a tensor; None: stop."},
    {"share", share, METH_NOARGS, "Let several threads take turns on the fast path. None may be on it now."},
    {"leave_turn", leave_turn, METH_NOARGS,
     "Leave the fast path, as code of the program is about to run. Returns whether this thread was there without a lock."},
    {"rejoin_turn", rejoin_turn, METH_NOARGS, "Return there, with the lock if others need it. False: call it again."},
    {"relearn", relearn, METH_NOARGS, "Forget what is known about operators."},
    {"entry", Entries::make, METH_VARARGS,
     "entry(make, original, hide, skips): return what to call in place of `original`, which calls make(original) such that\n"
     "the original sees none of our frames. hide: called with the errors that leave it, or None. skips: the caller's frame\n"
     "is ours."},
    {"is_inside", is_inside, METH_NOARGS, "Return whether another thread is on the fast path."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "_dtrrun_native", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace dtrrun

PyMODINIT_FUNC PyInit__dtrrun_native() {
  using namespace dtrrun;
  nothing = PyTuple_New(0);
  storages = {[](Storage* one) { ImplRef::reclaim_copy(as_impl(one)).release(); },
              [](Storage* one) { ImplRef::reclaim(as_impl(one)); }};
  count_nodes();
  storage_object = [](Storage* one) { return object_of(as_torch(StorageRef::copy(one))).release(); };
  storage_in = [](PyObject* object) {
    if (!is_storage(object)) throw c10::TypeError({__func__, __FILE__, 0}, "a storage is wanted");
    return as_storage(THPStorage_Unpack(object).unsafeGetStorageImpl());
  };
  settle_deaths = tell_deaths;
  version_type = make_version_type({"_dtrrun_native.Version", sizeof(StoredVersion), make_version, call_version});
  program_has = [](const VersionObject* one) { return has_storage(static_cast<const StoredVersion*>(one)); };
  operation_type = make_operation_type("_dtrrun_native.Operation");
  policy_type = make_policy_type("_dtrrun_native.Policy");
  observed_call_type = make_observed_call_type();
  CompiledKernel::type = CompiledKernel::make_type();
  Ref made(PyModule_Create(&module));
  if (!made || !add_core_types(made.get(), "_dtrrun_native")) return nullptr;
  if (!Entries::add_types() || PyModule_AddType(made.get(), Entries::entry_type) < 0) return nullptr;
  if (observed_call_type == nullptr || CompiledKernel::type == nullptr || PyModule_AddType(made.get(), observed_call_type) < 0) return nullptr;
  return made.release();
}
