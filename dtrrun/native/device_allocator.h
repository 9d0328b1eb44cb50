// Retries requests that a GPU's caching allocator refuses, after other tensors have been evicted for them (`Shortage`).
//
// Room is made for an operator's results before it runs. What a library allocates itself is not known then, nor whether free
// memory is contiguous. A kernel that is refused memory may have written already, and could not run again. And cuDNN's
// convolutions do not report it: they would take another algorithm, with different bits, and remember it.
//
// It also keeps the allocator from flushing. Where no cached block fits a request that may not grow its memory either, the
// allocator waits for the stream, returns all free memory to the driver, and maps it again, which takes longer than to compute
// most tensors again (docs/design/cuda.md, "Flushes"). Before it does, it calls its FreeMemoryCallbacks. Ours could not evict
// there, because the allocator is locked: another thread may have our lock and wait for the allocator's. So it throws; the
// request leaves the allocator as it was, dtrrun evicts a window of neighbouring blocks unless a flush is far cheaper (`Flushes`), and
// the request is made again.
#pragma once

#include <ATen/Context.h>
#include <c10/core/Allocator.h>
#include <c10/util/Registry.h>
#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>

#include "counted_kernel.h"
#include "device_blocks.h"
#include "shortage.h"
#include "tables.h"

namespace c10 {

// As in c10/cuda/CUDACachingAllocator.h, which needs CUDA's headers.
class FreeMemoryCallback {
 public:
  virtual ~FreeMemoryCallback() = default;
  virtual bool Execute() = 0;
};

}  // namespace c10

namespace dtrrun {

// PyTorch has one allocator for all GPUs, and no hook for refused requests. So its `allocate` is replaced in a copy of its
// vtable, permanently: code that replaces it later may keep a pointer to ours. An object of ours in the place of the allocator
// (`c10::cuda::CUDACachingAllocator::allocator` is a pointer to it) would be less safe: it would have to pass on each of its virtual
// functions, of which there are other ones in each version of PyTorch, and code that has the allocator's address would not reach it.
class DeviceAllocator {
 public:
  static void watch(c10::DeviceType type) {
    if (original_ != nullptr) return;
    c10::Allocator* allocator = c10::GetAllocator(type);
    void*** table = reinterpret_cast<void***>(allocator);
    size_t place = place_of(&c10::Allocator::allocate);
    count_ = functions_in(*table);
    if (place >= count_ || !is_at(*table, place, "allocate")) return;
    functions_ = new void*[ABOVE + count_] + ABOVE;
    std::copy(*table - ABOVE, *table + count_, functions_ - ABOVE);
    original_ = reinterpret_cast<Allocate>(functions_[place]);
    functions_[place] = reinterpret_cast<void*>(&allocate);
    *table = functions_;
    if (auto registry = reinterpret_cast<Registry* (*)()>(dlsym(RTLD_DEFAULT, REGISTRY))) {
      calls_back_ = true;
      registry()->Register("dtrrun", [] { return std::unique_ptr<c10::FreeMemoryCallback>(new NothingFits()); });
    }
  }

  // Whether PyTorch's tensors get their memory through our function, once there are any, and whether the allocator has callbacks.
  static bool is_asked() { return is_asked_; }
  static bool calls_back() { return calls_back_; }

  // Lets the allocator tell `DeviceBlocks` of its blocks, from now on. Returns false if it can't.
  static bool tells_of_blocks(c10::DeviceType type) {
    static const bool tells = attach_tracker(c10::GetAllocator(type));
    return tells;
  }

 private:
  // `attachAllocatorTraceTracker` is virtual, and its place in the table differs from version to version. PyTorch exports another
  // class with the same functions, whose table shows the place.
  static bool attach_tracker(c10::Allocator* allocator) {
    if (original_ == nullptr) return false;
    auto table = static_cast<void**>(dlsym(RTLD_DEFAULT, SIBLING_TABLE));
    void* wanted = nullptr;
    for (const char* name : SIBLING_TRACKERS)
      if (wanted == nullptr) wanted = dlsym(RTLD_DEFAULT, name);
    if (table == nullptr || wanted == nullptr) return false;
    table += ABOVE;
    size_t place = std::find(table, table + functions_in(table), wanted) - table;
    if (place >= std::min(count_, functions_in(table))) return false;
    auto attach = reinterpret_cast<void (*)(c10::Allocator*, DeviceBlocks::Tracker)>(functions_[place]);
    try {
      attach(allocator, [](const DeviceBlocks::Told& told) { DeviceBlocks::own().tell(told); });
    } catch (const c10::Error&) {  // another allocator (cudaMallocAsync)
      return false;
    }
    return true;
  }

  // Returns how many functions a table has; more, if pointers to other functions follow it. No symbol says so: PyTorch does not
  // export that of its allocator. But what follows a table is no code: it is the head of another one, with a number and a type,
  // or data.
  static size_t functions_in(void* const* table) {
    size_t count = 0;
    while (is_code(table[count])) count++;
    return count;
  }
  static bool is_code(void* address) {
    return dl_iterate_phdr(
        [](dl_phdr_info* library, size_t, void* address) -> int {
          for (const ElfW(Phdr)* part = library->dlpi_phdr; part != library->dlpi_phdr + library->dlpi_phnum; part++) {
            size_t offset = reinterpret_cast<uintptr_t>(address) - library->dlpi_addr - part->p_vaddr;
            if (part->p_type == PT_LOAD && (part->p_flags & PF_X) != 0 && offset < part->p_memsz) return 1;
          }
          return 0;
        },
        address);
  }

  // Where `armed`, throws itself out of the allocator when no cached block fits a request.
  struct NothingFits : c10::FreeMemoryCallback {
    struct Thrown {};
    bool Execute() override {
      if (std::exchange(armed, false)) throw Thrown();
      return false;
    }
    static inline thread_local bool armed = false;
  };

  using Registry = c10::Registry<std::string, std::unique_ptr<c10::FreeMemoryCallback>>;
  // c10::FreeCudaMemoryCallbacksRegistry(), in libc10_cuda.
  static constexpr const char* REGISTRY = "_ZN3c1031FreeCudaMemoryCallbacksRegistryB5cxx11Ev";
  using Allocate = c10::DataPtr (*)(c10::Allocator*, size_t);
  static constexpr size_t ABOVE = 2;  // entries before the functions: the offset of the object's start, and its type
  // torch::cuda::CUDAPluggableAllocator::CUDAPluggableAllocator, in libtorch_cuda, and its `attachAllocatorTraceTracker`.
  static constexpr const char* SIBLING_TABLE = "_ZTVN5torch4cuda22CUDAPluggableAllocator22CUDAPluggableAllocatorE";
  static constexpr const char* SIBLING_TRACKERS[] = {
      "_ZN5torch4cuda22CUDAPluggableAllocator22CUDAPluggableAllocator27attachAllocatorTraceTrackerESt8functionIFvRKN3c1022"
      "CachingDeviceAllocator10TraceEntryEEE",
      "_ZN5torch4cuda22CUDAPluggableAllocator22CUDAPluggableAllocator27attachAllocatorTraceTrackerESt8functionIFvRKN3c104cuda"
      "20CUDACachingAllocator10TraceEntryEEE",  // before 2.10 or so
  };

  static c10::DataPtr allocate(c10::Allocator* self, size_t nbytes) {
    is_asked_.store(true, std::memory_order_relaxed);
    CountedKernel::allocates(nbytes);
    bool asks = CountedKernel::is_exact() || Shortage::own().asks_before_flush();
    for (int attempt = 0;;) {
      try {
        NothingFits::armed = asks;
        c10::DataPtr found = original_(self, nbytes);
        NothingFits::armed = false;
        return found;
      } catch (const NothingFits::Thrown&) {
        if (CountedKernel::is_exact()) CountedKernel::refuse();
        asks = false;
        Shortage::own().before_flush(nbytes);
      } catch (const c10::OutOfMemoryError& error) {
        NothingFits::armed = false;
        auto answer = Shortage::own().relieve(nbytes, attempt++);
        if (answer == Shortage::Answer::ASK_AGAIN) continue;
        // A benchmark takes what there is memory for, and chooses by time: its results differ from run to run anyway.
        if (answer == Shortage::Answer::FAIL && !at::globalContext().benchmarkCuDNN()) Shortage::Kernel::refuse(error);
        throw;
      } catch (...) {
        NothingFits::armed = false;
        throw;
      }
    }
  }

  static inline void** functions_ = nullptr;  // never freed
  static inline size_t count_ = 0;
  static inline Allocate original_ = nullptr;
  static inline bool calls_back_ = false;
  static inline std::atomic<bool> is_asked_ = false;
};

}  // namespace dtrrun
