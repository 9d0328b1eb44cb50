// What the extension's functions for Python need of one another. Each group of functions has a file of its own.
#pragma once

#include <c10/core/Device.h>

#include <optional>

#include "../bindings/bind.h"
#include "python.h"

namespace dtrrun {

void bind_memory(py::module_& module);   // memory_functions.cpp
void bind_foreign(py::module_& module);  // foreign_functions.cpp

bool is_session_open();
std::optional<c10::DeviceType> device_type_of_session();

// The handler of faults, which brings evicted memory back that code of others touches.
void watch_faults();
void unwatch_faults();

// Has a GPU's allocator ask before it refuses memory.
void watch_device_allocator(c10::DeviceType type);

}  // namespace dtrrun
