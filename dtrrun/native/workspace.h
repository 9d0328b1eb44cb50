// What a GPU's library could do without, but then with another algorithm, and other bits: its workspace
// (`runtime/cuda/operators.py`).
#pragma once

#include <c10/core/Allocator.h>

#include "device.h"
#include "tensor_versions.h"

namespace dtrrun {

class Workspaces {
 public:
  Workspaces(PyObject* python, const TensorVersions& versions, const Device& device)
      : python_(Ref::copy(python)), ledger_(versions.ledger), device_(device) {}

  // `CudaOperators.provide`: when memory is short, blocks for a call's results and its workspace are cached, one each. This
  // thread is on the main stream.
  void provide(PyObject* found) const {
    int64_t workspace = signature_.workspace.number(found);
    if (workspace == 0 || !ledger_.pressure || ledger_.budget_bytes < 0) return;
    try {
      device_.take({signature_.output_bytes.number(found) - workspace, workspace});
    } catch (const c10::OutOfMemoryError&) {
      Ref refusal = as_error(std::current_exception());
      checked(PyObject_CallMethod(python_.get(), "provide", "OO", found, refusal.get()));
    }
  }

 private:
  Ref python_;
  const Ledger& ledger_;
  const Device& device_;
  SignatureFields signature_;
};

}  // namespace dtrrun
