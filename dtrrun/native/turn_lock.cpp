#include "turn_lock.h"

#include <exception>

namespace dtrrun {

void TurnLock::wait() {
  bool is_patient = true;
  while (true) {
    PyLockStatus status;
    {
      WithoutGil released;
      status = PyThread_acquire_lock_timed(lock_, is_patient ? patience_us_ : -1, 1);
    }
    if (status == PY_LOCK_ACQUIRED) return owned();
    if (status == PY_LOCK_INTR) {
      if (Py_MakePendingCalls() < 0) raise();
    } else {
      is_patient = false;
      alert(owner_);
    }
  }
}

int TurnLock::give_up() {
  if (!is_owned()) return 0;
  int count = std::exchange(count_, 1);
  release();
  return count;
}

void TurnLock::take_back(int count) {
  if (count == 0) return;
  std::exception_ptr interrupt;
  while (true) {
    try {
      acquire();
      break;
    } catch (...) {
      interrupt = std::current_exception();
    }
  }
  count_ = count;
  if (interrupt) std::rethrow_exception(interrupt);
}

void bind_turn_lock(py::module_& extension) {
  py::class_<TurnLock>(
      extension, "TurnLock", ITS_OWN, collected<TurnLock, &TurnLock::alert>(),
      "The reentrant lock of a session, also for `threading.Condition`. An interrupt leaves each call done or not.")
      .def(py::init<py::object, double>(), "alert"_a, "seconds"_a,
           "alert: called with the number of the thread that has the lock, once another one has waited so many seconds for it.")
      .def(
          "acquire",
          [](TurnLock& self, bool blocking) {
            if (!blocking) return self.try_acquire();
            self.acquire();
            return true;
          },
          "blocking"_a = true)
      .def("release", &TurnLock::release)
      .def("__enter__", [](TurnLock& self) { self.acquire(); })
      .def("__exit__", [](TurnLock& self, const py::args&) { self.release(); })
      .def(
          "given_up", [](py::object self) { return GivenUp(std::move(self)); },
          "Return a context in which this thread does not have it.")
      .def("_is_owned", &TurnLock::is_owned)
      .def("_release_save", &TurnLock::give_up)
      .def("_acquire_restore", &TurnLock::take_back);
  py::class_<GivenUp>(extension, "GivenUp", ITS_OWN, collected<GivenUp, &GivenUp::lock>())
      .def("__enter__", &GivenUp::enter)
      .def("__exit__", [](GivenUp& self, const py::args&) { self.exit(); });
}

}  // namespace dtrrun
