// A session's nodes: what they have besides what `bindings/nodes.h` says. A version knows its storage. An operation is
// followed in memory by its recipe, and that by the versions that it reads.
#pragma once

#include "../bindings/nodes.h"
#include "recipe.h"
#include "storages.h"

namespace dtrrun {

struct StoredVersion : VersionObject {
  c10::StorageImpl* storage;  // a weak reference; null once another version has it. It reveals the storage's death, unless
                              // the storage is not of PyTorch's own class: then `watch` does
  bool died;                  // the storage has died, and the session knows it
};

inline StoredVersion* as_stored(PyObject* object) { return static_cast<StoredVersion*>(as_version(object)); }
inline StoredVersion* as_stored(const Version* version) { return static_cast<StoredVersion*>(enclosing(version)); }

inline void delete_version(Node* node) {
  StoredVersion* one = as_stored(as_version(node));
  let_go(std::exchange(one->storage, nullptr));
  free_version(one);
}

inline Recipe* recipe_of(OperationObject* one) { return one->has_recipe ? reinterpret_cast<Recipe*>(one + 1) : nullptr; }
// Null if Python has made it, for a test.
inline const Recipe* recipe_of(const Recorded* operation) { return recipe_of(enclosing(operation)); }

// Makes an operation with a recipe that is made of `given` and the number of its arguments. reads: the
// maximum number of versions that it will read.
template <class... Given>
OperationRef recorded_operation(size_t reads, uint32_t arguments, const Given&... given) {
  OperationRef made = blank_operation(Recipe::nbytes(arguments) + reads * sizeof(Node*));
  OperationObject* one = enclosing(made.get());
  new (one + 1) Recipe(given..., arguments);
  one->has_recipe = true;
  one->operation.reads = reinterpret_cast<Node**>(reinterpret_cast<char*>(one + 1) + Recipe::nbytes(arguments));
  one->is_fixed = true;
  return made;
}

// Lets the core free nodes, and recipes with them.
inline void count_nodes() {
  free_node = delete_version;
  free_operation = delete_operation;
  arguments_of_calls.destroy = [](OperationObject* one) { recipe_of(one)->~Recipe(); };
  arguments_of_calls.show = [](OperationObject* one) { return Ref::copy(recipe_of(one)->func.get()).release(); };
}

// -- PyTorch's storages, as the core has them --------------------------------------------------------------------

inline Storage* as_storage(c10::StorageImpl* storage) { return reinterpret_cast<Storage*>(storage); }
inline c10::StorageImpl* as_impl(Storage* storage) { return reinterpret_cast<c10::StorageImpl*>(storage); }
inline c10::StorageImpl* as_impl(const StorageRef& storage) { return as_impl(storage.get()); }
inline StorageRef as_storage(ImplRef storage) { return StorageRef::take(as_storage(storage.release())); }
inline StorageRef as_storage(const c10::Storage& storage) { return StorageRef::copy(as_storage(storage.unsafeGetStorageImpl())); }
inline c10::Storage as_torch(const StorageRef& storage) { return c10::Storage(ImplRef::reclaim_copy(as_impl(storage))); }

}  // namespace dtrrun
