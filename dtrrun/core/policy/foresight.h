// Predicts when each storage is used next, according to an earlier step.
#pragma once

#include "pool.h"

namespace dtrrun {

// The base class predicts nothing. A subclass follows a recorded step.
class Foresight {
 public:
  virtual ~Foresight() = default;

  // Finds the present position in the recorded step. Returns whether it changed other than by moving forward.
  virtual bool look() { return false; }
  // Returns when the program uses the node next, or NEVER. Called only while there is a position.
  virtual int64_t next_use(Node*) const { return NEVER; }

  // The result of the last `look`: whether there is a position in a recorded step, and which.
  bool predicts() const { return predicts_; }
  int64_t position() const { return position_; }
  // The distance assigned to what is not used again: greater than any other.
  int64_t horizon() const { return horizon_; }

 protected:
  bool predicts_ = false;
  int64_t position_ = 0, horizon_ = 1;
};

}  // namespace dtrrun
