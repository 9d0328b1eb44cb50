// What the extension's functions for Python need of one another. Each group of functions has a file of its own.
#pragma once

#include <c10/core/Device.h>

#include <optional>

#include "python.h"

namespace dtrrun {

extern PyMethodDef session_functions[];  // interposer.cpp
extern PyMethodDef memory_functions[];   // memory_functions.cpp
extern PyMethodDef foreign_functions[];  // foreign_functions.cpp

bool is_session_open();
std::optional<c10::DeviceType> device_type_of_session();

// The handler of faults, which brings evicted memory back that code of others touches.
void watch_faults();
void unwatch_faults();

// Has a GPU's allocator ask before it refuses memory.
void watch_device_allocator(c10::DeviceType type);

// Adds the classes of `entries.h` to the extension. Returns false, with an error set, if that fails.
bool add_entry_types(PyObject* extension);

}  // namespace dtrrun
