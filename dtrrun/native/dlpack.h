// DLPack's C exchange API: a table of functions that hand out tensors' memory without Python.
#pragma once

#include "python.h"
#include "python_objects.h"
#include "tables.h"

namespace dtrrun {

// While a session is on, PyTorch's own table contains our functions. Consumers look up the table once for the life of the
// process, some before the session begins, so another table would not reach all of them. A consumer that has copied our
// functions reaches PyTorch's through them after the session.
class Exports {
 public:
  // capsule: `torch.Tensor.__dlpack_c_exchange_api__`. reach: called with each tensor that is about to be handed out; None puts
  // PyTorch's functions back into the table. Returns whether the table is as we know it.
  static PyObject* guard(PyObject* capsule, PyObject* reach) {
    if (!PyCapsule_IsValid(capsule, NAME)) Py_RETURN_FALSE;
    auto* table = static_cast<Table*>(PyCapsule_GetPointer(capsule, NAME));
    if (table->major != MAJOR || table->to_owner == nullptr) Py_RETURN_FALSE;
    if (to_owner_ == nullptr) {
      auto* functions = reinterpret_cast<const void* const*>(table);
      if (!is_at(functions, offsetof(Table, to_owner) / sizeof(Export), "ManagedTensorFromPyObjectNoSync")) Py_RETURN_FALSE;
      to_owner_ = table->to_owner;
      to_borrower_ = table->to_borrower;
    }
    bool on = reach != Py_None;
    reach_ = on ? Ref::copy(reach) : Ref();
    table->to_owner = on ? &export_to_owner : to_owner_;
    if (to_borrower_ != nullptr) table->to_borrower = on ? &export_to_borrower : to_borrower_;
    Py_RETURN_TRUE;
  }

 private:
  static constexpr const char* NAME = "dlpack_exchange_api";
  static constexpr uint32_t MAJOR = 1;  // another one may have a different layout

  // `DLPackExchangeAPI` from ATen/dlpack.h, which not all versions of PyTorch have.
  using Export = int (*)(void* tensor, void* out);
  struct Table {
    uint32_t major, minor;
    void* older;
    void* allocate;
    Export to_owner;  // managed_tensor_from_py_object_no_sync
    void* import;
    Export to_borrower;  // dltensor_from_py_object_no_sync, or null: for the duration of a call
  };

  static int export_to_owner(void* tensor, void* out) { return is_ready(tensor) ? to_owner_(tensor, out) : -1; }
  static int export_to_borrower(void* tensor, void* out) { return is_ready(tensor) ? to_borrower_(tensor, out) : -1; }

  // The caller has the GIL. Returns false with a Python error set.
  static bool is_ready(void* object) {
    auto* tensor = static_cast<PyObject*>(object);
    if (!reach_ || !is_tensor(tensor)) return true;
    Ref reach = Ref::copy(reach_.get());
    return static_cast<bool>(Ref(PyObject_CallOneArg(reach.get(), tensor)));
  }

  static inline Ref& reach_ = *new Ref;  // never destroyed: Python may be gone by then
  static inline Export to_owner_ = nullptr, to_borrower_ = nullptr;  // PyTorch's
};

}  // namespace dtrrun
