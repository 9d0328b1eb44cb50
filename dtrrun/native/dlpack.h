// DLPack's C exchange: a table of functions that hand out tensors' memory without Python.
#pragma once

#include <ATen/dlpack.h>
#include <torch/csrc/autograd/python_variable.h>

#include "python.h"

namespace dtrrun {

// While a session is on, the functions in PyTorch's own table are ours. Consumers look the table up once for the life of the
// process, some before the session begins, so another table would not reach all of them. A consumer that has copied our
// functions goes on to call PyTorch's after the session.
class Exports {
 public:
  // capsule: `torch.Tensor.__dlpack_c_exchange_api__`. reach: called with each tensor that is about to be handed out; None:
  // PyTorch's functions are in the table again.
  static PyObject* guard(PyObject* capsule, PyObject* reach) {
    auto* table = static_cast<DLPackExchangeAPI*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
    if (table == nullptr) return nullptr;
    bool on = reach != Py_None;
    if (on && !reach_) {
      owning_ = table->managed_tensor_from_py_object_no_sync;
      borrowing_ = table->dltensor_from_py_object_no_sync;
    }
    if (on || reach_) {
      table->managed_tensor_from_py_object_no_sync = on ? &to_owner : owning_;
      if (borrowing_ != nullptr) table->dltensor_from_py_object_no_sync = on ? &to_borrower : borrowing_;
    }
    reach_ = on ? Ref::copy(reach) : Ref();
    Py_RETURN_NONE;
  }

 private:
  static int to_owner(void* object, DLManagedTensorVersioned** out) { return is_ready(object) ? owning_(object, out) : -1; }
  static int to_borrower(void* object, DLTensor* out) { return is_ready(object) ? borrowing_(object, out) : -1; }

  // The caller has the GIL. Returns false with an error of Python's set.
  static bool is_ready(void* object) {
    auto* tensor = static_cast<PyObject*>(object);
    if (!reach_ || !THPVariable_Check(tensor)) return true;
    return static_cast<bool>(Ref(PyObject_CallOneArg(Ref::copy(reach_.get()).get(), tensor)));
  }

  static inline Ref& reach_ = *new Ref;  // never destroyed: Python may be gone by then
  static inline DLPackManagedTensorFromPyObjectNoSync owning_ = nullptr;
  static inline DLPackDLTensorFromPyObjectNoSync borrowing_ = nullptr;
};

}  // namespace dtrrun
