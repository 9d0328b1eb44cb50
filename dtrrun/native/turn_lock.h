// The lock of a session.
//
// It is in C++ because of interrupts: Python raises what a signal handler raises before any of its instructions that follow a
// call. If taking the lock were a function in Python, an interrupt could arrive between the call that takes it and that
// function's end: nobody would release it, and all other threads would wait forever.
#pragma once

#include <cstdint>

#include "../bindings/bind.h"
#include "python.h"

namespace dtrrun {

// Reentrant. Its calls need the GIL, and release it while they wait.
class TurnLock {
 public:
  // alert: called with the number of the thread that has the lock, once another one has waited so many seconds for it.
  TurnLock(py::object alert, double seconds)
      : alert(std::move(alert)), patience_us_(static_cast<PY_TIMEOUT_T>(seconds * 1e6)), lock_(PyThread_allocate_lock()) {
    if (lock_ == nullptr) throw std::bad_alloc();
  }
  ~TurnLock() { PyThread_free_lock(lock_); }
  TurnLock(const TurnLock&) = delete;

  bool is_owned() const { return owner_ == PyThread_get_thread_ident(); }

  // Returns whether this thread has it now. Does not wait.
  bool try_acquire() {
    if (!is_owned() && PyThread_acquire_lock(lock_, NOWAIT_LOCK) == 0) return false;
    owned();
    return true;
  }
  // Returns how long it waited, in ns. Raises what a signal handler raises meanwhile: then this thread does not have it.
  int64_t acquire() {
    if (try_acquire()) return 0;
    int64_t started = now_ns();
    wait();
    return now_ns() - started;
  }
  void release() {
    if (!is_owned()) throw std::runtime_error("this thread does not have its turn");
    if (--count_ != 0) return;
    owner_ = 0;
    PyThread_release_lock(lock_);
  }

  // Releases it as often as this thread has acquired it. Returns how often that is.
  int give_up();
  // Acquires it as often as it was given up. What a signal handler raises meanwhile is raised once this thread has it.
  void take_back(int count);

  py::object alert;

 private:
  void owned() {
    owner_ = PyThread_get_thread_ident();
    count_++;
  }
  void wait();

  const PY_TIMEOUT_T patience_us_;
  PyThread_type_lock lock_;
  unsigned long owner_ = 0;  // a thread's number; 0: nobody
  int count_ = 0;
};

// A moment in which a thread has given up the lock, as a context for Python.
class GivenUp {
 public:
  explicit GivenUp(py::object lock) : lock(std::move(lock)) {}
  void enter() { count_ = bound<TurnLock>(lock.ptr())->give_up(); }
  void exit() { bound<TurnLock>(lock.ptr())->take_back(std::exchange(count_, 0)); }

  py::object lock;

 private:
  int count_ = 0;
};

// Adds the classes to the extension.
void bind_turn_lock(py::module_& extension);

}  // namespace dtrrun
