// Brings an evicted storage back when code that is not an operator touches its memory.
//
// A placeholder (`placeholders.h`) can be neither read nor written, so the system stops a thread that tries with a signal. The
// handler brings the storage back in that thread, puts its memory where the placeholder was, and lets the thread continue. From
// then on the storage stays there, like one whose address the program has asked for.
//
// Unlike most signals, this one comes from the very instruction that touches the memory, in C++ code that is reading a tensor.
// It is not in the middle of changing the state of the C library's allocator or of the interpreter, so the handler can use both.
//
// All other faults are the program's. They are passed on to the handler that was there before ours. That one may do the same,
// and its predecessor may be ours, if the program has installed it during the session (`faulthandler.enable()`): then the fault
// comes here again, within the first call, and goes to the handler before that one. In the end it ends the process.
#pragma once

#include <ATen/Parallel.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>

#include "callers.h"

namespace dtrrun {

// A thread whose fault is being passed on.
struct FaultPassedOn {
  std::atomic<pid_t> thread{0};
  size_t times = 0;
  uintptr_t stack = 0;
};

// Brings an evicted storage back for code that touches it. words: that code's `Words`. Returns false if no session has it.
bool bring_back(const Placeholders::Claim& claim, const std::vector<uintptr_t>& words);

class Faults {
 public:
  // Brings back the storage of a claim, and returns true once its memory is where its placeholder was. Called with the GIL; may
  // set a Python error.
  // words: what the code that touches it holds (`callers.h`).
  using BringBack = bool (*)(const Placeholders::Claim& claim, const std::vector<uintptr_t>& words);

  // Handles faults at placeholders from now on. Called again from time to time, since the program may have replaced our
  // handler.
  static void watch(BringBack bring_back) {
    bring_back_ = bring_back;
    Placeholders::own();  // made now, not in the handler: a crash may come from the C library's allocator
    struct sigaction now, own{};
    sigaction(SIGSEGV, nullptr, &now);
    if (is_ours(now)) return;
    Others::add(now);
    own.sa_sigaction = &handle;
    own.sa_flags = SA_SIGINFO | SA_NODEFER;  // bringing one back may touch another; on the thread's stack, which is large
    sigemptyset(&own.sa_mask);
    sigaction(SIGSEGV, &own, nullptr);
  }
  static void unwatch() {
    struct sigaction now;
    sigaction(SIGSEGV, nullptr, &now);
    if (is_ours(now)) sigaction(SIGSEGV, &Others::at(1), nullptr);
  }

  // Returns how often storages have been brought back here.
  static int64_t count() { return count_; }

 private:
  static void handle(int signal, siginfo_t* info, void* context) {
    auto address = reinterpret_cast<uintptr_t>(info->si_addr);
    bool ours = info->si_code > 0 && Placeholders::own().has(address);  // and not sent by a process
    int error_number = errno;
    if (ours && is_brought_back(address, *static_cast<ucontext_t*>(context))) {
      errno = error_number;
      return;
    }
    Passed passed;
    struct sigaction& other = Others::at(passed.times() + Repeated::handlers_without_effect(*info));
    if ((other.sa_flags & SA_SIGINFO) != 0) {
      other.sa_sigaction(signal, info, context);
    } else if (other.sa_handler != SIG_DFL && other.sa_handler != SIG_IGN) {
      other.sa_handler(signal);
    } else {
      sigaction(signal, &other, nullptr);
      if (info->si_code <= 0) ::raise(signal);  // otherwise the thread executes the same instruction again
    }
  }

  static bool is_ours(const struct sigaction& one) { return (one.sa_flags & SA_SIGINFO) != 0 && one.sa_sigaction == &handle; }

  // The program's handlers that ours has taken the place of.
  class Others {
   public:
    static void add(const struct sigaction& one) {
      size_t gone = 0;
      while (gone < count_ && !(all_[gone].sa_handler == one.sa_handler && all_[gone].sa_flags == one.sa_flags)) gone++;
      if (gone == all_.size()) gone = 1;  // there are too many; but not the first, which is from before the session
      if (gone < count_) {
        std::copy(all_.begin() + gone + 1, all_.begin() + count_, all_.begin() + gone);
        count_--;
      }
      all_[count_++] = one;
    }
    // Returns one of them: the last one for 1, the one before for 2. There is no end to the default one.
    static struct sigaction& at(size_t place) {
      static struct sigaction by_default{};
      return place <= count_ ? all_[count_ - place] : by_default;
    }

   private:
    static inline std::array<struct sigaction, 8> all_{};
    static inline size_t count_ = 0;
  };

  // How often a fault of this thread has been passed on: while in scope, one time more. Not a `thread_local`, which may be
  // allocated when it is first used: the fault may come from the C library's allocator.
  class Passed {
   public:
    Passed() : thread_(static_cast<pid_t>(syscall(SYS_gettid))) {
      for (FaultPassedOn& one : all_)
        if (one.thread == thread_) own_ = &one;
      for (FaultPassedOn& one : all_) {
        pid_t nobody = 0;
        if (own_ == nullptr && one.thread.compare_exchange_strong(nobody, thread_)) own_ = &one;
      }
      if (own_ == nullptr) return;
      auto here = reinterpret_cast<uintptr_t>(this);
      if (here >= own_->stack) own_->times = 0;  // a handler has left with `longjmp`
      own_->stack = here;
      times_ = ++own_->times;
    }
    ~Passed() {
      if (own_ != nullptr && --own_->times == 0) own_->thread = 0;
    }
    Passed(const Passed&) = delete;
    size_t times() const { return times_; }

   private:
    static inline std::array<FaultPassedOn, 16> all_;
    pid_t thread_;
    FaultPassedOn* own_ = nullptr;
    size_t times_ = 1;
  };

  // Counts the handlers that have returned without effect, such as `faulthandler`'s once it has been disabled: the same
  // instruction faults again and again.
  class Repeated {
   public:
    static size_t handlers_without_effect(const siginfo_t& info) {
      timespec now;
      clock_gettime(CLOCK_MONOTONIC, &now);
      int64_t ns = now.tv_sec * 1'000'000'000 + now.tv_nsec;
      bool again = info.si_code > 0 && info.si_addr == address_ && ns - last_ns_ < AT_ONCE_NS;
      times_ = again ? times_ + 1 : 0;
      address_ = info.si_addr;
      last_ns_ = ns;
      return times_ / OFTEN;
    }

   private:
    static constexpr size_t OFTEN = 1000;
    static constexpr int64_t AT_ONCE_NS = 1'000'000;
    static inline std::atomic<void*> address_{nullptr};
    static inline std::atomic<size_t> times_{0};
    static inline std::atomic<int64_t> last_ns_{0};
  };

  static bool is_brought_back(uintptr_t address, const ucontext_t& stopped) {
    Placeholders::Claim claim = Placeholders::own().claim(address);
    if (claim.first == 0) return refuse("it has been brought back to another place since its address was taken");
    struct Release {
      const Placeholders::Claim& claim;
      ~Release() { Placeholders::own().release(claim); }
    } release{claim};
    if (claim.is_memory) return true;
    if (!Py_IsInitialized()) return refuse("the interpreter has ended");
    std::string why;
    auto words = Words::of_stopped_code(stopped);
    bool done = at::in_parallel_region() ? asks_elsewhere(claim, words, why) : asks(claim, words, why);
    if (!done) return refuse(why.c_str());
    count_++;
    return true;
  }

  // Inside a parallel region, other kernels would run in one thread, and might sum in another order. So they run in a new
  // thread, outside any region.
  static bool asks_elsewhere(const Placeholders::Claim& claim, const std::vector<uintptr_t>& words, std::string& why) {
    bool done = false;
    PyThreadState* saved = PyGILState_Check() ? PyEval_SaveThread() : nullptr;
    std::thread([&] { done = asks(claim, words, why); }).join();
    if (saved != nullptr) PyEval_RestoreThread(saved);
    return done;
  }

  static bool asks(const Placeholders::Claim& claim, const std::vector<uintptr_t>& words, std::string& why) {
    Watchdog watchdog;
    PyGILState_STATE state = PyGILState_Ensure();
    watchdog.end();
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    bool done = false, interrupted = false;
    why = "the session has ended";
    for (int attempt = 0; attempt < 2 && !done; attempt++) {
      try {
        done = bring_back_ != nullptr && bring_back_(claim, words);
      } catch (...) {
        set_python_error();
      }
      if (!PyErr_Occurred()) break;
      bool again = PyErr_ExceptionMatches(PyExc_KeyboardInterrupt);
      interrupted = interrupted || again;
      why = take_error();
      if (!again) break;
    }
    if (interrupted) PyErr_SetInterrupt();  // for the program, once it is back in Python
    PyErr_Restore(type, value, traceback);
    PyGILState_Release(state);
    return done;
  }

  // Returns the text of the current Python error, and clears the error.
  static std::string take_error() {
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    Ref types(type), values(value), frames(traceback), text(value == nullptr ? nullptr : PyObject_Str(value));
    const char* found = text ? PyUnicode_AsUTF8(text.get()) : nullptr;
    std::string why = found == nullptr ? "an error" : found;
    PyErr_Clear();
    return why;
  }

  static bool refuse(const char* why) {
    std::string text =
        "dtrrun: error: native code reads the memory of an evicted tensor without an operator, and dtrrun cannot "
        "bring the tensor back: ";
    text += why;
    text += ". Keep such tensors in memory with session.pin(tensor).\n";
    if (write(STDERR_FILENO, text.data(), text.size()) < 0) return false;
    return false;
  }

  // Aborts the process if the GIL cannot be acquired in 30 s. A worker thread would wait forever if the function that it works
  // for has the GIL while it waits for its workers.
  class Watchdog {
   public:
    Watchdog() {
      if (PyGILState_GetThisThreadState() != nullptr) return;  // a Python thread, not a worker of one that waits for it
      has_ended_ = std::make_shared<std::atomic<bool>>(false);
      std::thread([has_ended = has_ended_] {
        for (int tenths = 0; tenths < 300; tenths++) {
          std::this_thread::sleep_for(std::chrono::milliseconds(100));
          if (*has_ended) return;
        }
        refuse("the thread that would do so waits for the one that reads it");
        std::abort();
      }).detach();
    }
    void end() {
      if (has_ended_) *has_ended_ = true;
    }

   private:
    std::shared_ptr<std::atomic<bool>> has_ended_;
  };

  static inline BringBack bring_back_ = nullptr;
  static inline std::atomic<int64_t> count_{0};
};

}  // namespace dtrrun
