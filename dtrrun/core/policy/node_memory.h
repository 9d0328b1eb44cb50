// Memory for nodes and for what the graph and the policy note about them: freed pieces are reused, the last one freed first.
//
// Every operator makes a version and an operation, each eviction and release some entries and short lists, and a backward pass frees
// as many; the C library's allocator would merge and split them again. Freed pieces stay here. For one thread at a time.
#pragma once

#include <array>
#include <cstddef>
#include <new>
#include <unordered_map>
#include <vector>

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

// A base of what is allocated there by `new`.
struct InNodeMemory {
  static void* operator new(size_t nbytes) { return NodeMemory::take(nbytes); }
  static void operator delete(void* memory, size_t nbytes) { NodeMemory::give_back(memory, nbytes); }
};

// The allocator of containers whose memory is there.
template <class One>
struct NodeAllocator {
  using value_type = One;
  NodeAllocator() = default;
  template <class Other>
  NodeAllocator(const NodeAllocator<Other>&) {}
  One* allocate(size_t count) { return static_cast<One*>(NodeMemory::take(count * sizeof(One))); }
  void deallocate(One* memory, size_t count) { NodeMemory::give_back(memory, count * sizeof(One)); }
  template <class Other>
  bool operator==(const NodeAllocator<Other>&) const {
    return true;
  }
  template <class Other>
  bool operator!=(const NodeAllocator<Other>&) const {
    return false;
  }
};

// For what is often empty or short.
template <class One>
using ShortVector = std::vector<One, NodeAllocator<One>>;
template <class Key, class Value>
using ShortMap = std::unordered_map<Key, Value, std::hash<Key>, std::equal_to<Key>, NodeAllocator<std::pair<const Key, Value>>>;

}  // namespace dtrrun
