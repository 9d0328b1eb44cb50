// Lets autograd run on tensors that say they are on a GPU where there is none (`runtime/absent`).
//
// PyTorch's FakeTensor has the shape of a tensor on any device, and no memory. Its backward pass fails where there is no GPU:
// autograd asks for the device's guard, which a PyTorch without CUDA lacks, and for streams and events, since a GPU is an
// accelerator. There is no hook for either. So the guard becomes PyTorch's own that does nothing, and PyTorch's libraries call
// functions of ours in place of the two that say what is an accelerator: nothing is. Only for a process that computes nothing.
#pragma once

#include <c10/core/DeviceType.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <optional>
#include <utility>

namespace dtrrun {

class AbsentGpu {
 public:
  // Returns how many calls lead to our functions now: 0 if PyTorch's functions have other names.
  static int install() {
    if (!c10::impl::hasDeviceGuardImpl(c10::DeviceType::CUDA)) {
      static c10::impl::DeviceGuardImplRegistrar guard(c10::DeviceType::CUDA,
                                                       new c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>());
    }
    int replaced = 0;
    dl_iterate_phdr(
        [](dl_phdr_info* library, size_t, void* count) -> int {
          if (std::strstr(library->dlpi_name, "libtorch") != nullptr) *static_cast<int*>(count) += replace_in(*library);
          return 0;
        },
        &replaced);
    return replaced;
  }

 private:
  static std::optional<c10::DeviceType> no_accelerator(bool) { return std::nullopt; }
  static bool is_no_accelerator(c10::DeviceType) { return false; }

  // Returns our function in place of one of PyTorch's, by its name; null for others. The names without a namespace of their own
  // are those of PyTorch before 2.10 or so.
  static void* in_place_of(const char* name) {
    for (const char* one : {"_ZN2at11accelerator14getAcceleratorEb", "_ZN2at14getAcceleratorEb"})
      if (std::strcmp(name, one) == 0) return reinterpret_cast<void*>(&no_accelerator);
    for (const char* one : {"_ZN2at11accelerator13isAcceleratorEN3c1010DeviceTypeE", "_ZN2at13isAcceleratorEN3c1010DeviceTypeE"})
      if (std::strcmp(name, one) == 0) return reinterpret_cast<void*>(&is_no_accelerator);
    return nullptr;
  }

  // Writes to the table of addresses that a library calls functions of its own and of others through.
  static int replace_in(const dl_phdr_info& library) {
    const ElfW(Dyn)* dynamic = nullptr;
    for (int place = 0; place < library.dlpi_phnum; place++)
      if (library.dlpi_phdr[place].p_type == PT_DYNAMIC)
        dynamic = reinterpret_cast<const ElfW(Dyn)*>(library.dlpi_addr + library.dlpi_phdr[place].p_vaddr);
    const ElfW(Sym)* symbols = nullptr;
    const char* names = nullptr;
    std::pair<const ElfW(Rela)*, size_t> tables[2] = {};
    for (; dynamic != nullptr && dynamic->d_tag != DT_NULL; dynamic++) {
      auto* address = reinterpret_cast<const void*>(dynamic->d_un.d_ptr);
      if (dynamic->d_tag == DT_SYMTAB) symbols = static_cast<const ElfW(Sym)*>(address);
      if (dynamic->d_tag == DT_STRTAB) names = static_cast<const char*>(address);
      if (dynamic->d_tag == DT_RELA) tables[0].first = static_cast<const ElfW(Rela)*>(address);
      if (dynamic->d_tag == DT_RELASZ) tables[0].second = dynamic->d_un.d_val / sizeof(ElfW(Rela));
      if (dynamic->d_tag == DT_JMPREL) tables[1].first = static_cast<const ElfW(Rela)*>(address);
      if (dynamic->d_tag == DT_PLTRELSZ) tables[1].second = dynamic->d_un.d_val / sizeof(ElfW(Rela));
    }
    int replaced = 0;
    for (auto [entries, count] : tables)
      for (size_t place = 0; entries != nullptr && place < count; place++) {
        auto symbol = ELF64_R_SYM(entries[place].r_info);
        void* ours = symbol == 0 ? nullptr : in_place_of(names + symbols[symbol].st_name);
        if (ours != nullptr && write(reinterpret_cast<void**>(library.dlpi_addr + entries[place].r_offset), ours)) replaced++;
      }
    return replaced;
  }

  // The page may be read-only since the library was loaded.
  static bool write(void** slot, void* value) {
    auto size = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    void* page = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(slot) & ~(size - 1));
    if (mprotect(page, size, PROT_READ | PROT_WRITE) != 0) return false;
    *slot = value;
    return true;
  }
};

}  // namespace dtrrun
