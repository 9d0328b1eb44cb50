// Finds the addresses that native code that calls an operator may hold.
//
// A library's function (called through pybind, say) may take a tensor's address, call a PyTorch operator, and then read at that
// address. The operator must neither evict that tensor nor bring it back elsewhere. Nothing tells us which addresses such a
// function has taken. But it is on the stack while the operator runs, and what it still needs is in its frames, in saved
// registers, or where these point to: so we look there, as a conservative garbage collector does.
#pragma once

#include <c10/core/TensorImpl.h>
#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <sys/uio.h>
#include <ucontext.h>
#include <unistd.h>
#include <unwind.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "tensor_versions.h"
#include "placeholders.h"

namespace dtrrun {

// The code of libraries that use PyTorch and are not part of it.
class ForeignCode {
 public:
  // The process-wide instance.
  static ForeignCode& own() {
    static ForeignCode& code = *new ForeignCode();
    return code;
  }

  // Returns true if any is loaded. Learns what has been loaded since the last call.
  bool any() {
    std::lock_guard<std::mutex> guard(mutex_);
    unsigned long long now = 0;
    dl_iterate_phdr(
        [](dl_phdr_info* object, size_t, void* now) {
          *static_cast<unsigned long long*>(now) = object->dlpi_adds + object->dlpi_subs;
          return 1;
        },
        &now);
    if (now != changes_) look(now);
    return !foreign_.empty();
  }
  // Returns the paths that they have been loaded from.
  std::vector<std::string> paths() {
    any();
    std::lock_guard<std::mutex> guard(mutex_);
    return paths_;
  }

  bool has(uintptr_t instruction) {
    std::lock_guard<std::mutex> guard(mutex_);
    return is_in(foreign_, instruction);
  }
  bool is_pythons(uintptr_t instruction) {
    std::lock_guard<std::mutex> guard(mutex_);
    return is_in(python_, instruction);
  }

 private:
  struct Range {
    uintptr_t begin, end;
  };

  void look(unsigned long long now) {
    changes_ = now;
    foreign_.clear();
    python_.clear();
    paths_.clear();
    dl_iterate_phdr(
        [](dl_phdr_info* object, size_t, void* self) {
          static_cast<ForeignCode*>(self)->meet(*object);
          return 0;
        },
        this);
  }
  void meet(const dl_phdr_info& object) {
    std::vector<Range> code;
    const ElfW(Dyn)* dynamic = nullptr;
    for (int i = 0; i < object.dlpi_phnum; i++) {
      const auto& part = object.dlpi_phdr[i];
      uintptr_t begin = object.dlpi_addr + part.p_vaddr;
      if (part.p_type == PT_LOAD && (part.p_flags & PF_X) != 0) code.push_back({begin, begin + part.p_memsz});
      if (part.p_type == PT_DYNAMIC) dynamic = reinterpret_cast<const ElfW(Dyn)*>(begin);
    }
    if (is_in(code, reinterpret_cast<uintptr_t>(&PyEval_SaveThread))) {
      python_ = std::move(code);
      return;
    }
    if (is_in(code, reinterpret_cast<uintptr_t>(&empty)) || !uses_pytorch(object, dynamic)) return;
    if (is_pytorchs(object.dlpi_name)) return;
    foreign_.insert(foreign_.end(), code.begin(), code.end());
    paths_.push_back(object.dlpi_name);
  }

  static bool uses_pytorch(const dl_phdr_info& object, const ElfW(Dyn) * dynamic) {
    if (dynamic == nullptr) return false;
    uintptr_t names = 0;
    for (auto* one = dynamic; one->d_tag != DT_NULL; one++)
      if (one->d_tag == DT_STRTAB) names = one->d_un.d_ptr;
    if (names == 0) return false;
    if (names < object.dlpi_addr) names += object.dlpi_addr;  // some systems leave it relative
    for (auto* one = dynamic; one->d_tag != DT_NULL; one++) {
      if (one->d_tag != DT_NEEDED) continue;
      std::string_view name = reinterpret_cast<const char*>(names + one->d_un.d_val);
      if (name.find("libc10") != name.npos || name.find("libtorch") != name.npos) return true;
    }
    return false;
  }
  // Returns true if a library is in PyTorch's folder: torch/_C.so, torch/lib/libtorch_cpu.so.
  static bool is_pytorchs(std::string_view name) {
    static const std::string& folder = *new std::string([] {
      Dl_info found{};
      dladdr(reinterpret_cast<const void*>(&c10::GetCPUAllocator), &found);
      std::string_view library = found.dli_fname == nullptr ? "" : found.dli_fname;
      for (int level = 0; level < 2; level++) library = library.substr(0, std::min(library.rfind('/'), library.size()));
      return std::string(library) + "/";
    }());
    return name.substr(0, folder.size()) == folder;
  }

  static bool is_in(const std::vector<Range>& ranges, uintptr_t address) {
    return std::any_of(ranges.begin(), ranges.end(), [&](const Range& one) { return one.begin <= address && address < one.end; });
  }

  std::mutex mutex_;
  unsigned long long changes_ = 0;  // the number of objects loaded and unloaded when we last looked
  std::vector<Range> foreign_, python_;
  std::vector<std::string> paths_;  // of foreign libraries
};

// The words that native code in this thread holds, up to the last Python function, if there is one. Sorted.
class Words {
 public:
  // Of foreign code.
  static std::vector<uintptr_t> of_foreign_code() {
    Words found(0);
    if (ForeignCode::own().any()) _Unwind_Backtrace(&visit, &found);
    return std::move(found).all();
  }
  // Of all code, at the point where a signal stopped it.
  static std::vector<uintptr_t> of_stopped_code(const ucontext_t& stopped) {
    const auto& at = stopped.uc_mcontext;
#if defined(__x86_64__)
    Words found(static_cast<uintptr_t>(at.gregs[REG_RSP]));
    constexpr size_t RED_ZONE = 128;
    found.words_.assign(std::begin(at.gregs), std::end(at.gregs));
    found.read_frame(found.stopped_ - RED_ZONE, found.stopped_);
#elif defined(__aarch64__)
    Words found(at.sp);
    found.words_.assign(std::begin(at.regs), std::end(at.regs));
#else
    Words found(UINTPTR_MAX);
#endif
    ForeignCode::own().any();
    _Unwind_Backtrace(&visit, &found);
    return std::move(found).all();
  }

 private:
  explicit Words(uintptr_t stopped) : stopped_(stopped) {}

  static constexpr int MOST_FRAMES = 64;
  static constexpr size_t MOST_BYTES = 256 << 10;  // of one frame
  static constexpr size_t BEHIND = 8;              // words that are read where a word points to
  static constexpr size_t MOST_IN_LIST = 4096;     // words between two pointers that look like a list's ends
#if defined(__x86_64__)
  static constexpr int KEPT_REGISTERS[] = {3, 6, 12, 13, 14, 15};  // rbx, rbp, r12 to r15, as DWARF numbers them
#elif defined(__aarch64__)
  static constexpr int KEPT_REGISTERS[] = {19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29};
#else
  static constexpr int KEPT_REGISTERS[] = {};
#endif

  static _Unwind_Reason_Code visit(_Unwind_Context* context, void* self) {
    return static_cast<Words*>(self)->meet(context) ? _URC_NO_REASON : _URC_END_OF_STACK;
  }
  // Returns false at the last frame.
  bool meet(_Unwind_Context* context) {
    uintptr_t instruction = _Unwind_GetIP(context), stack = _Unwind_GetCFA(context);  // the frame's end of the stack
    if (frame_ != 0) read_frame(frame_, stack);
    frame_ = 0;
    if (stack < stopped_) return true;  // our handler's frame
    if (++frames_ > MOST_FRAMES || ForeignCode::own().is_pythons(instruction)) return false;
    if (stopped_ == 0 && !ForeignCode::own().has(instruction)) return true;
    frame_ = stack;
    for (int place : KEPT_REGISTERS) words_.push_back(_Unwind_GetGR(context, place));
    return true;
  }
  // Also reads between a frame's variables, which AddressSanitizer forbids.
  __attribute__((no_sanitize("address"))) void read_frame(uintptr_t begin, uintptr_t end) {
    if (end < begin) return;
    auto* first = reinterpret_cast<const uintptr_t*>(begin);
    for (size_t i = 0, count = std::min(end - begin, MOST_BYTES) / sizeof(uintptr_t); i < count; i++) {
      uintptr_t word = first[i];
      words_.push_back(word);
    }
  }

  std::vector<uintptr_t> all() && {
    std::vector<iovec> places;
    for (size_t i = 0; i < words_.size(); i++) {
      uintptr_t word = words_[i];
      if (word % sizeof(uintptr_t) != 0 || word < 1 << 16 || word >> 47 != 0 || Placeholders::own().has(word)) continue;
      size_t count = BEHIND;
      if (i + 1 < words_.size() && words_[i + 1] > word && (words_[i + 1] - word) / sizeof(uintptr_t) <= MOST_IN_LIST)
        count = std::max(count, (words_[i + 1] - word) / sizeof(uintptr_t));
      places.push_back({reinterpret_cast<void*>(word), count * sizeof(uintptr_t)});
    }
    follow(places);
    std::sort(words_.begin(), words_.end());
    words_.erase(std::unique(words_.begin(), words_.end()), words_.end());
    return std::move(words_);
  }
  // Adds what is at these places, as far as the system can read it.
  void follow(const std::vector<iovec>& places) {
    constexpr size_t AT_ONCE = 512;
    for (size_t first = 0; first < places.size();) {
      size_t count = std::min(AT_ONCE, places.size() - first), nbytes = 0, before = words_.size();
      for (size_t i = 0; i < count; i++) nbytes += places[first + i].iov_len;
      words_.resize(before + nbytes / sizeof(uintptr_t));
      iovec own{words_.data() + before, nbytes};
      ssize_t found = process_vm_readv(getpid(), &own, 1, &places[first], count, 0);
      size_t left = found < 0 ? 0 : static_cast<size_t>(found);
      words_.resize(before + left / sizeof(uintptr_t));
      if (found < 0 && errno != EFAULT) return;  // a container may forbid it
      size_t done = 0;
      while (done < count && left >= places[first + done].iov_len) left -= places[first + done++].iov_len;
      first += done < count ? done + 1 : done;  // skips the one that cannot be read
    }
  }

  const uintptr_t stopped_;  // the stack pointer of code that was stopped by a signal, or 0
  uintptr_t frame_ = 0;      // that of the last frame, if it is to be read
  int frames_ = 0;
  std::vector<uintptr_t> words_;
};

// Keeps the memory of these tensors where such code expects it: what is resident stays, and what is brought back meanwhile is
// moved to its placeholder at the end.
class Anchors {
 public:
  // words: sorted. but: a storage to skip, since the caller takes care of it, or null.
  Anchors(const TensorVersions& versions, const std::vector<uintptr_t>& words, const c10::StorageImpl* but = nullptr) {
    if (words.empty()) return;
    for (Version* one = versions.ledger.versions.first(); one != nullptr; one = one->after) {
      ImplRef storage = one->constant() && !versions.ledger.constants_leave ? ImplRef() : TensorVersions::storage_of(one);
      if (!storage || storage.get() == but || storage->device_type() != c10::DeviceType::CPU) continue;
      auto begin = reinterpret_cast<uintptr_t>(storage->data_ptr().get());
      auto word = std::lower_bound(words.begin(), words.end(), begin);
      if (word == words.end() || *word > begin + storage->nbytes()) continue;  // a loop may end at the address past the end
      bool is_evicted = Placeholders::is_one(storage.get());
      held_.push_back({VersionRef(one), is_evicted ? Placeholders::own().claim(begin) : Placeholders::Claim{}});
      one->locks++;
    }
  }
  ~Anchors() {
    for (const Held& one : held_) {
      one.version->locks--;
      if (one.claim.first == 0) continue;
      ImplRef storage = TensorVersions::storage_of(one.version.get());
      bool is_back = storage && !is_empty(storage.get()) && !one.version->escaped;
      if (is_back && !Placeholders::own().is_memory(one.claim)) Placeholders::own().make_memory(one.claim, storage.get());
      Placeholders::own().release(one.claim);
    }
  }
  Anchors(const Anchors&) = delete;

 private:
  struct Held {
    VersionRef version;
    Placeholders::Claim claim;  // of one that is evicted
  };
  std::vector<Held> held_;
};

}  // namespace dtrrun
