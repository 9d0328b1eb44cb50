// Memory for nodes: freed pieces are reused, the last one freed first.
//
// Every operator makes a version and an operation, and a backward pass frees as many; the C library's allocator would merge and
// split them again. Freed pieces stay here. For one thread at a time.
#pragma once

#include <array>
#include <cstddef>
#include <new>

namespace dtrrun {

class NodeMemory {
 public:
  static void* take(size_t nbytes) {
    size_t kind = kind_of(nbytes);
    if (kind >= KINDS) return ::operator new(nbytes);
    if (free_[kind] == nullptr) add_pieces(kind);
    Piece* first = free_[kind];
    free_[kind] = first->next;
    return first;
  }
  static void give_back(void* memory, size_t nbytes) {
    size_t kind = kind_of(nbytes);
    if (kind >= KINDS) return ::operator delete(memory);
    free_[kind] = new (memory) Piece{free_[kind]};
  }

 private:
  struct Piece {
    Piece* next;
  };
  static constexpr size_t STEP = 16, AT_ONCE = 64;
#if defined(__SANITIZE_ADDRESS__)
  static constexpr size_t KINDS = 1;  // so that AddressSanitizer sees uses of freed nodes
#else
  static constexpr size_t KINDS = 64;
#endif

  static size_t kind_of(size_t nbytes) { return (nbytes + STEP - 1) / STEP; }
  static void add_pieces(size_t kind) {
    size_t nbytes = kind * STEP;
    auto* pieces = static_cast<char*>(::operator new(AT_ONCE * nbytes));  // never freed
    for (size_t i = AT_ONCE; i-- > 0;) give_back(pieces + i * nbytes, nbytes);
  }

  static inline std::array<Piece*, KINDS> free_{};
};

}  // namespace dtrrun
