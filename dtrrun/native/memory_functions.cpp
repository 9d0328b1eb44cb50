// Functions for Python: storages, the heap, what is allocated outside of operators, a GPU's blocks, and a GPU that is absent.
#include "absent_gpu.h"
#include "backend.h"
#include "device_allocator.h"
#include "functions.h"
#include "heap.h"
#include "host_tier.h"
#include "placeholders.h"
#include "stored_versions.h"

namespace dtrrun {

void watch_device_allocator(c10::DeviceType type) { DeviceAllocator::watch(type); }

namespace {

PyObject* hears_device_allocator(PyObject*, PyObject*) {
  return Py_BuildValue("(NN)", PyBool_FromLong(DeviceAllocator::is_asked()), PyBool_FromLong(DeviceAllocator::calls_back()));
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
    auto device_type = device_type_of_session();
    if (!device_type || !DeviceAllocator::tells_of_blocks(*device_type)) Py_RETURN_FALSE;
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
      DeviceBlocks::Segment segment{static_cast<uintptr_t>(address), static_cast<size_t>(nbytes), small != 0, expandable != 0,
                                    ours != 0};
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
    Core& core = core_of(ledger);
    auto given = std::tuple(&core, &blocks, static_cast<int64_t>(wanted), static_cast<int64_t>(at_most), false);
    core.backend->beneath(
        [](void* all) {
          auto& [core, blocks, wanted, at_most, done] = *static_cast<decltype(given)*>(all);
          done = evict_window(*core, *blocks, wanted, at_most);
        },
        &given);
    return PyBool_FromLong(std::get<bool>(given));
  });
}

PyObject* outside(PyObject*, PyObject*) { return PyLong_FromSize_t(Outside::own().nbytes()); }

PyObject* met_outside(PyObject*, PyObject* storage) {
  return guarded([&]() -> PyObject* {
    if (!is_storage(storage)) return PyLong_FromLong(0);
    return PyLong_FromSize_t(Outside::own().leave(checked_storage(storage).data()));
  });
}

PyObject* open_host_file(PyObject*, PyObject* args) {
  PyObject* ledger;
  const char* folder;
  long long most_bytes;
  double ns_out, ns_in;
  int modelled, overlaps = 0;
  if (!PyArg_ParseTuple(args, "OsLddp|p", &ledger, &folder, &most_bytes, &ns_out, &ns_in, &modelled, &overlaps)) return nullptr;
  try {
    core_of(ledger).ledger.tier = std::make_shared<FileTier>(folder, most_bytes, ns_out, ns_in, modelled != 0, overlaps != 0);
  } catch (const std::system_error& error) {
    errno = error.code().value();
    return PyErr_SetFromErrnoWithFilename(PyExc_OSError, folder);
  }
  Py_RETURN_NONE;
}

PyObject* open_host_memory(PyObject*, PyObject* args) {
  PyObject* ledger;
  long long most_bytes;
  double ns_out, ns_in;
  int modelled;
  if (!PyArg_ParseTuple(args, "OLddp", &ledger, &most_bytes, &ns_out, &ns_in, &modelled)) return nullptr;
  return done([&] {
    Core& core = core_of(ledger);
    core.ledger.tier = std::make_shared<PinnedTier>(backend_of(core), most_bytes, ns_out, ns_in, modelled != 0);
  });
}

PyObject* host_forked(PyObject*, PyObject* ledger) {
  return done([&] {
    if (auto* tier = dynamic_cast<FileTier*>(core_of(ledger).ledger.tier.get())) tier->forked();
  });
}

PyObject* swap(PyObject*, PyObject* args) {
  PyObject *one, *other;
  if (!PyArg_ParseTuple(args, "OO", &one, &other)) return nullptr;
  return guarded([&]() -> PyObject* {
    swap_memory(*checked_storage(one).unsafeGetStorageImpl(), *checked_storage(other).unsafeGetStorageImpl());
    Py_RETURN_NONE;
  });
}

PyObject* evict(PyObject*, PyObject* storage) {
  return guarded([&]() -> PyObject* {
    empty(checked_storage(storage).unsafeGetStorageImpl());
    Py_RETURN_NONE;
  });
}

PyObject* is_evicted(PyObject*, PyObject* storage) {
  return guarded([&]() -> PyObject* { return PyBool_FromLong(is_empty(checked_storage(storage).unsafeGetStorageImpl())); });
}

PyObject* is_for_shapes_only(PyObject*, PyObject* storage) {
  return guarded([&]() -> PyObject* { return PyBool_FromLong(is_for_shapes(checked_storage(storage).unsafeGetStorageImpl())); });
}

PyObject* spoil_evicted(PyObject*, PyObject* on) {
  spoils_evicted = PyObject_IsTrue(on);
  Py_RETURN_NONE;
}

// A hash of the content of a storage in host memory.
PyObject* checksum(PyObject*, PyObject* storage) {
  return guarded([&]() -> PyObject* {
    c10::Storage kept = checked_storage(storage);
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

PyObject* storage_of_tensor(PyObject*, PyObject* tensor) {
  return guarded([&]() -> PyObject* {
    if (!is_tensor(tensor)) throw c10::TypeError({__func__, __FILE__, 0}, "a tensor is wanted");
    return object_of(tensor_of(tensor).storage()).release();
  });
}

PyObject* stand_in_for_gpu(PyObject*, PyObject*) { return PyBool_FromLong(AbsentGpu::install() > 0); }

PyObject* key_of_storage(PyObject*, PyObject* storage) { return PyLong_FromLongLong(key_of(storage)); }

PyObject* living(PyObject*, PyObject*) {
  return Py_BuildValue("(LL)", static_cast<long long>(living_versions), static_cast<long long>(living_operations));
}

}  // namespace

PyMethodDef memory_functions[] = {
    {"use_heap", use_heap, METH_O,
     "Allocate tensors from our heap, or stop. Returns False if PyTorch has been given another allocator."},
    {"hears_device_allocator", hears_device_allocator, METH_NOARGS,
     "Return whether tensors on a GPU have got memory through our function, and whether its allocator has callbacks."},
    {"cap_heap", cap_heap, METH_O, "Limit the bytes that the heap's blocks and free pages may take; None: no limit."},
    {"heap_figures", heap_figures, METH_NOARGS,
     "Return the heap's bytes: (of blocks, of free pages, cleared by the system, returned to it)."},
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
    {"open_host_file", open_host_file, METH_VARARGS,
     "open_host_file(ledger, folder, most_bytes, ns_out, ns_in, modelled, overlaps=False): let constants leave for a file without a name in\n"
     "this folder. ns_out, ns_in: what a byte takes, until it is measured; modelled: always. Raises OSError."},
    {"open_host_memory", open_host_memory, METH_VARARGS,
     "open_host_memory(ledger, most_bytes, ns_out, ns_in, modelled): let constants of a GPU leave for pinned memory."},
    {"host_forked", host_forked, METH_O, "A child has been forked, which may read the copies that there are now."},
    {"evict_window", evict_window, METH_VARARGS,
     "evict_window(ledger, segments, wanted, at_most): evict the cheapest window of neighbouring blocks for `wanted` contiguous\n"
     "bytes, unless computing them again costs more than `at_most` ns (-1: whatever it costs). segments: lists of (address,\n"
     "bytes, is free); None: those that are followed. Returns whether that was possible."},
    {"outside", outside, METH_NOARGS, "Return the bytes of such blocks that no version accounts for."},
    {"met_outside", met_outside, METH_O,
     "Note that a version accounts for this storage. Returns the bytes that it had among those."},
    {"swap", swap, METH_VARARGS, "swap(storage, storage): swap what they hold."},
    {"evict", evict, METH_O, "Release a storage's memory. `Interposer.touched` is called when code touches it from now on."},
    {"is_evicted", is_evicted, METH_O, "Return whether a storage is evicted."},
    {"is_for_shapes", is_for_shapes_only, METH_O, "Return whether a storage has never had memory: it is there for shapes only."},
    {"spoil_evicted", spoil_evicted, METH_O, "For tests: overwrite what is evicted, or stop doing so."},
    {"checksum", checksum, METH_O, "Return a hash of the content of a storage in host memory."},
    {"storage_of", storage_of_tensor, METH_O, "Return a tensor's storage, as an object that PyTorch does not know of."},
    {"key_of", key_of_storage, METH_O, "Return the key of a storage's versions."},
    {"stand_in_for_gpu", stand_in_for_gpu, METH_NOARGS,
     "Let autograd run on tensors without memory that say they are on a GPU, where there is none. Returns False if it can't."},
    {"living", living, METH_NOARGS,
     "Return the numbers of (versions, operations) that exist, which the garbage collector does not know."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace dtrrun
