// A storage: PyTorch's in a session, a stand-in in a simulation. The core only holds references to it.
#pragma once

#include <utility>

#include "policy/node.h"

namespace dtrrun {

struct Storage;  // opaque: only the extension knows the type

// How an extension counts references to its storages. Set when it is loaded.
struct StorageLifetime {
  void (*keep)(Storage*) = nullptr;
  void (*let_go)(Storage*) = nullptr;
};
inline StorageLifetime storages;

// An owning reference to a storage.
class StorageRef {
 public:
  StorageRef() = default;
  static StorageRef copy(Storage* borrowed) {
    if (borrowed != nullptr) storages.keep(borrowed);
    return StorageRef(borrowed);
  }
  static StorageRef take(Storage* owned) { return StorageRef(owned); }
  StorageRef(const StorageRef& other) : StorageRef(copy(other.storage_)) {}
  StorageRef(StorageRef&& other) noexcept : storage_(std::exchange(other.storage_, nullptr)) {}
  StorageRef& operator=(StorageRef other) noexcept {
    std::swap(storage_, other.storage_);
    return *this;
  }
  ~StorageRef() { reset(); }
  void reset() {
    if (Storage* before = std::exchange(storage_, nullptr)) storages.let_go(before);
  }
  Storage* get() const { return storage_; }
  explicit operator bool() const { return storage_ != nullptr; }

 private:
  explicit StorageRef(Storage* owned) : storage_(owned) {}
  Storage* storage_ = nullptr;
};

}  // namespace dtrrun
