// Turns at the ledger, if several threads use the session: the thread whose turn it is holds the lock.
//
// Code of the program never runs in a turn: it may wait for another thread of the program, which may wait for its turn.
// `runtime/dispatch/turns.py` says where code of the program is called, and how its thread gives up its turn meanwhile.
#pragma once

#include <chrono>
#include <exception>
#include <thread>

#include "turn_lock.h"

namespace dtrrun {

class Held {
 public:
  explicit Held(TurnLock& lock) : lock_(lock) { lock.acquire(); }
  ~Held() { lock_.release(); }
  Held(const Held&) = delete;

 private:
  TurnLock& lock_;
};

// The turn of one operator.
class Turn {
 public:
  // shared: whether other threads use the session. Otherwise there is nothing to wait for.
  Turn(TurnLock& lock, bool shared) : lock_(lock), shared_(shared) {
    if (shared) waited_ns = lock.acquire();
  }
  ~Turn() {
    if (shared_) lock_.release();
  }
  Turn(const Turn&) = delete;

  bool shared() const { return shared_; }

  // Called in a turn that has not waited for others, once there are any.
  void begin_sharing() {
    if (shared_) return;
    resume();
    shared_ = true;
  }

  // Lets other threads have their turns until `resume`.
  void pause() const { lock_.release(); }
  void resume() {
    while (true) {
      try {
        waited_ns += lock_.acquire();
        return;
      } catch (...) {  // the operator has run, and its results must be entered first
        interrupt_ = std::current_exception();
      }
    }
  }
  // Raises an interrupt that came while the operator waited to resume its turn.
  void raise_interrupt() const {
    if (interrupt_) std::rethrow_exception(interrupt_);
  }

  int64_t waited_ns = 0;

 private:
  TurnLock& lock_;
  bool shared_;
  std::exception_ptr interrupt_;
};

// Whose turn it is as long as one thread uses the session, without a lock. A thread gives up its turn while code of the program runs
// in the middle of its operator.
class Turns {
 public:
  // Returns whether the thread had its turn without a lock.
  virtual bool leave() = 0;
  // Returns false if it must be called again, as another thread is about to join.
  virtual bool rejoin() = 0;

  // A moment in which other threads have their turns.
  class Away {
   public:
    Away(Turns& turns, Turn& turn) : turns_(turns), turn_(turn), paused_(turn.shared()), alone_(turns.leave()) {
      if (paused_) turn_.pause();
    }
    // Waits for the thread's turn.
    ~Away() {
      if (paused_) turn_.resume();
      while (alone_ && !turns_.rejoin()) {
        WithoutGil released;
        std::this_thread::sleep_for(std::chrono::microseconds(20));
      }
    }
    Away(const Away&) = delete;

   private:
    Turns& turns_;
    Turn& turn_;
    const bool paused_, alone_;
  };

 protected:
  ~Turns() = default;
};

}  // namespace dtrrun
