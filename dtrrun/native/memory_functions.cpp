// Functions for Python: storages, the heap, what is allocated outside of operators, a GPU's blocks, and a GPU that is absent.
#include "absent_gpu.h"
#include "device_allocator.h"
#include "flushes.h"
#include "functions.h"
#include "heap.h"
#include "host_tier.h"
#include "placeholders.h"
#include "stored_versions.h"

namespace dtrrun {

void watch_device_allocator(c10::DeviceType type) { DeviceAllocator::watch(type); }

namespace {

c10::StorageImpl* impl_of(py::handle storage) { return checked_storage(storage.ptr()).unsafeGetStorageImpl(); }

// Returns a function to be called, or null to stop.
PyObject* function_or_null(py::handle given) { return given.is_none() ? nullptr : given.ptr(); }

bool use_heap(bool on) {
  if (on) return Heap::own().install();
  Heap::own().remove();
  return true;
}

bool follow_blocks(int device, int devices) {
  auto device_type = device_type_of_session();
  if (!device_type || !DeviceAllocator::tells_of_blocks(*device_type)) return false;
  DeviceBlocks::own().prepare(device, devices);
  return true;
}

using ToldBlock = std::tuple<int64_t, int64_t, int64_t, bool>;
using ToldSegment = std::tuple<int64_t, int64_t, bool, bool, bool, std::vector<ToldBlock>>;

bool start_blocks(const std::vector<ToldSegment>& snapshot) {
  std::vector<std::pair<DeviceBlocks::Segment, std::vector<DeviceBlocks::Block>>> segments;
  for (const auto& [place, size, small, expandable, ours, blocks] : snapshot) {
    DeviceBlocks::Segment segment{static_cast<uintptr_t>(place), static_cast<size_t>(size), small, expandable, ours};
    segments.emplace_back(segment, std::vector<DeviceBlocks::Block>());
    for (const auto& [address, nbytes, requested, free] : blocks)
      segments.back().second.push_back(
          {static_cast<uintptr_t>(address), static_cast<size_t>(nbytes), static_cast<size_t>(requested), free});
  }
  return DeviceBlocks::own().start(segments);
}

using ServingSegment = std::vector<std::tuple<int64_t, int64_t, bool>>;  // address, bytes, is free

std::vector<ServingSegment> blocks_serving(size_t nbytes) {
  std::vector<ServingSegment> found;
  ServingSegment segment;
  DeviceBlocks::own().each_serving(nbytes, [&](const DeviceBlock& one) {
    if (one.nbytes == 0)
      found.push_back(std::exchange(segment, {}));
    else
      segment.emplace_back(one.address, one.nbytes, one.free);
  });
  return found;
}

void bind_flushes(py::module_& module) {
  py::class_<Flushes>(module, "Flushes", ITS_OWN,
                      collected<Flushes, &Flushes::ledger, &Flushes::lock, &Flushes::gpu, &Flushes::accounts, &Flushes::pools,
                                &Flushes::follow>(),
                      "Keeps the allocator of one of a session's GPUs from flushing (flushes.h).")
      .def(py::init<py::object, py::object, py::object, py::object, py::object, py::object, int64_t>(), "ledger"_a, "lock"_a,
           "gpu"_a, "accounts"_a, "pools"_a, "follow"_a, "place"_a,
           "follow: called where the allocator's blocks are not followed; returns whether they are now.")
      .def("avoid", &Flushes::avoid, "nbytes"_a, "Make room for a request of that size if the allocator would flush for it.")
      .def("evict_window", &Flushes::evict_window, "wanted"_a, "at_most"_a = -1,
           "Evict the cheapest window of neighbouring blocks for `wanted` contiguous bytes, unless computing them again costs\n"
           "more than `at_most` ns (-1: whatever it costs). Returns whether that was possible.")
      .def("take_unused", &Flushes::take_unused,
           "Return for each search since the last call, unless it is much, how many bytes more tensors could have taken.")
      .def_readonly("searches", &Flushes::searches)
      .def_readonly("processor_ns", &Flushes::processor_ns)
      .def_readonly("avoided", &Flushes::avoided)
      .def_readwrite("avoiding_ns", &Flushes::avoiding_ns);
  module.def("avoid_flushes", &Flushes::listen, "devices"_a,
             "Attend to requests for which a GPU's allocator has no cached block: with the `Flushes` of each of these devices.");
  module.def("most_ns", &Flushes::most_ns, "free"_a, "wanted"_a,
             "Return what a window of blocks may cost, so that a flush with these bytes is not far cheaper.");
  module.def("growth_for", &Flushes::growth_for, "nbytes"_a,
             "Return what a request counts against the allocator's cap if it has to be mapped.");
  module.def("flush_ns", &Flushes::flush_ns, "free"_a, "wanted"_a, "flushes"_a = 1,
             "Return the time that so many flushes cost in which `free` bytes are unmapped and `wanted` bytes are mapped again.");
}

size_t met_outside(py::handle storage) {
  return is_storage(storage.ptr()) ? Outside::own().leave(checked_storage(storage.ptr()).data()) : 0;
}

void open_host_file(Core& core, const std::string& folder, int64_t most_bytes, double ns_out, double ns_in, bool modelled,
                    bool overlaps) {
  try {
    core.ledger.tier = std::make_shared<FileTier>(folder.c_str(), most_bytes, ns_out, ns_in, modelled, overlaps);
  } catch (const std::system_error& error) {
    errno = error.code().value();
    PyErr_SetFromErrnoWithFilename(PyExc_OSError, folder.c_str());
    raise();
  }
}

// A hash of the content of a storage in host memory.
uint64_t checksum(py::handle storage) {
  c10::Storage kept = checked_storage(storage.ptr());
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
  return all;
}

Ref storage_of_tensor(py::handle tensor) {
  if (!is_tensor(tensor.ptr())) throw c10::TypeError({__func__, __FILE__, 0}, "a tensor is wanted");
  return object_of(tensor_of(tensor.ptr()).storage());
}

}  // namespace

void bind_memory(py::module_& module) {
  module.def("use_heap", &use_heap,
             "Allocate tensors from our heap, or stop. Returns False if PyTorch has been given another allocator.");
  module.def(
      "hears_device_allocator", [] { return std::pair(DeviceAllocator::is_asked(), DeviceAllocator::calls_back()); },
      "Return whether tensors on a GPU have got memory through our function, and whether its allocator has callbacks.");
  module.def(
      "cap_heap", [](std::optional<size_t> nbytes) { Heap::own().set_cap(nbytes.value_or(SIZE_MAX)); },
      "Limit the bytes that the heap's blocks and free pages may take; None: no limit.");
  module.def(
      "heap_figures",
      [] {
        Arena::Figures of = Heap::own().figures();
        return std::tuple(of.taken, of.warm, of.cleared, of.returned);
      },
      "Return the heap's bytes: (of blocks, of free pages, cleared by the system, returned to it).");
  module.def("heap_most", [] { return Heap::own().most(); }, "Return the most bytes of blocks at once since the last call.");
  module.def(
      "ask_for_room", [](py::handle ask) { Outside::own().listen(function_or_null(ask)); },
      "Call a function with the bytes of each block that is about to be allocated outside of an operator; None: stop.");
  module.def(
      "on_shortage", [](py::handle release) { Shortage::own().listen(function_or_null(release)); },
      "Call a function with the bytes of a block that the system refuses and the number of the attempt; None: stop.");
  bind_flushes(module);
  module.def(
      "follow_blocks", &follow_blocks, "index"_a, "count"_a,
      "Let a GPU's allocator tell of its blocks on one of so many devices. Returns False if it can't. A snapshot must follow.");
  module.def(
      "start_blocks", &start_blocks,
      "Take over that snapshot, a list of (address, bytes, is small, is expandable, is ours, blocks), each with blocks (address,\n"
      "bytes, requested bytes, is free). Returns False if the blocks can't be followed.");
  module.def("leave_blocks", [] { DeviceBlocks::own().stop(); }, "Stop following blocks.");
  module.def(
      "segment_bytes", [] { return DeviceBlocks::own().reserved_bytes(); },
      "Return the bytes of all segments, as far as followed.");
  module.def(
      "returnable_bytes", [] { return DeviceBlocks::own().returnable_bytes(); },
      "For tests: return the bytes of followed pages that the allocator would return to the driver if it flushed.");
  module.def(
      "blocks_serving", &blocks_serving,
      "For tests: return the followed segments that can serve a request of that size, lists of (address, bytes, is free).");
  module.def(
      "open_host_file", &open_host_file, "ledger"_a, "folder"_a, "most_bytes"_a, "ns_out"_a, "ns_in"_a, "modelled"_a,
      "overlaps"_a = false,
      "Let constants leave for a file without a name in this folder. ns_out, ns_in: what a byte takes, until it is measured;\n"
      "modelled: always. Raises OSError.");
  module.def(
      "open_host_memory",
      [](Core& core, int64_t most_bytes, double ns_out, double ns_in, bool modelled) {
        core.ledger.tier = std::make_shared<PinnedTier>(backend_of(core), most_bytes, ns_out, ns_in, modelled);
      },
      "ledger"_a, "most_bytes"_a, "ns_out"_a, "ns_in"_a, "modelled"_a, "Let constants of a GPU leave for pinned memory.");
  module.def(
      "host_forked",
      [](Core& core) {
        if (auto* tier = dynamic_cast<FileTier*>(core.ledger.tier.get())) tier->forked();
      },
      "A child has been forked, which may read the copies that there are now.");
  module.def("outside", [] { return Outside::own().nbytes(); }, "Return the bytes of such blocks that no version accounts for.");
  module.def("met_outside", &met_outside,
             "Note that a version accounts for this storage. Returns the bytes that it had among those.");
  module.def(
      "swap", [](py::handle one, py::handle other) { swap_memory(*impl_of(one), *impl_of(other)); },
      "Swap what two storages hold.");
  module.def(
      "evict", [](py::handle storage) { empty(impl_of(storage)); },
      "Release a storage's memory. `Interposer.touched` is called when code touches it from now on.");
  module.def("is_evicted", [](py::handle storage) { return is_empty(impl_of(storage)); }, "Return whether a storage is evicted.");
  module.def(
      "is_for_shapes", [](py::handle storage) { return is_for_shapes(impl_of(storage)); },
      "Return whether a storage has never had memory: it is there for shapes only.");
  module.def("spoil_evicted", [](bool on) { spoils_evicted = on; }, "For tests: overwrite what is evicted, or stop doing so.");
  module.def("checksum", &checksum, "Return a hash of the content of a storage in host memory.");
  module.def("storage_of", &storage_of_tensor, "Return a tensor's storage, as an object that PyTorch does not know of.");
  module.def("key_of", [](py::handle storage) { return key_of(storage.ptr()); }, "Return the key of a storage's versions.");
  module.def(
      "stand_in_for_gpu", [] { return AbsentGpu::install() > 0; },
      "Let autograd run on tensors without memory that say they are on a GPU, where there is none. Returns False if it can't.");
  module.def(
      "living", [] { return std::pair(living_versions, living_operations); },
      "Return the numbers of (versions, operations) that exist, which the garbage collector does not know.");
}

}  // namespace dtrrun
