// Tables of PyTorch's functions, of which a session replaces some: whether the function that is expected at a place is there. Asked
// before it is replaced (docs/design/native.md, "What is replaced in PyTorch").
#pragma once

#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <link.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace dtrrun {

// A file in memory, as it is on disk.
class MappedFile {
 public:
  explicit MappedFile(const char* path) {
    int file = ::open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return;
    struct stat facts;
    void* found = ::fstat(file, &facts) == 0 ? ::mmap(nullptr, facts.st_size, PROT_READ, MAP_PRIVATE, file, 0) : MAP_FAILED;
    if (found != MAP_FAILED) begin_ = static_cast<const char*>(found), size_ = facts.st_size;
    ::close(file);
  }
  ~MappedFile() {
    if (begin_ != nullptr) ::munmap(const_cast<char*>(begin_), size_);
  }
  MappedFile(const MappedFile&) = delete;

  // Returns `count` objects from there, or null if the file does not have them.
  template <class Object>
  const Object* at(size_t offset, size_t count = 1) const {
    bool is_there = offset <= size_ && count <= (size_ - offset) / sizeof(Object) && offset % alignof(Object) == 0;
    return is_there ? reinterpret_cast<const Object*>(begin_ + offset) : nullptr;
  }
  // Returns the text there, up to its zero.
  std::string_view text(size_t offset) const {
    if (offset >= size_) return {};
    return {begin_ + offset, ::strnlen(begin_ + offset, size_ - offset)};
  }

 private:
  const char* begin_ = nullptr;
  size_t size_ = 0;
};

// Returns the name of the function that begins at this address, as the C++ compiler has encoded it; "" if that is unknown. `dladdr`
// knows only what a library exports, and PyTorch's allocators are not: but libraries that have not been stripped list all functions.
inline std::string symbol_at(const void* function) {
  Dl_info its;
  if (::dladdr(function, &its) == 0) return "";
  if (its.dli_sname != nullptr && its.dli_saddr == function) return its.dli_sname;
  MappedFile library(its.dli_fname);
  const auto* head = library.at<ElfW(Ehdr)>(0);
  if (head == nullptr || std::string_view(reinterpret_cast<const char*>(head->e_ident), SELFMAG) != ELFMAG) return "";
  const auto* sections = library.at<ElfW(Shdr)>(head->e_shoff, head->e_shnum);
  if (sections == nullptr) return "";
  const auto address = static_cast<const char*>(function) - static_cast<const char*>(its.dli_fbase);
  for (const ElfW(Shdr)* section = sections; section != sections + head->e_shnum; section++) {
    if (section->sh_type != SHT_SYMTAB || section->sh_link >= head->e_shnum) continue;
    const size_t count = section->sh_size / sizeof(ElfW(Sym));
    const auto* symbols = library.at<ElfW(Sym)>(section->sh_offset, count);
    for (size_t i = 0; symbols != nullptr && i < count; i++)
      if (symbols[i].st_value == static_cast<ElfW(Addr)>(address) && symbols[i].st_shndx != SHN_UNDEF)
        return std::string(library.text(sections[section->sh_link].sh_offset + symbols[i].st_name));
  }
  return "";
}

// Returns the place of a virtual function in its class's table, as the C++ ABI has it in a pointer to a member.
template <class Function>
size_t place_of(Function function) {
  uintptr_t offset;  // on some machines plus 1
  std::memcpy(&offset, &function, sizeof offset);
  return offset / sizeof(void*);
}

// For tests: a function by whose name tables are not as they should be, as in a PyTorch that has changed: it is one place further.
inline std::string& moved = *new std::string;

// Returns whether the function at a place of a table has that name, apart from its class and its arguments, or its name is unknown.
// kind: what follows the name: D for the destructor of a class of that name.
inline bool is_at(const void* const* table, size_t place, std::string_view name, std::string_view kind = "") {
  const std::string symbol = symbol_at(table[place + (name == moved)]);
  return symbol.empty() || symbol.find(std::to_string(name.size()).append(name).append(kind)) != std::string::npos;
}

}  // namespace dtrrun
