// When each storage is used next, according to an earlier step.
#pragma once

#include "pool.h"

namespace dtrrun {

// Nothing is predicted. What follows a recorded step overrides all of it.
class Foresight {
 public:
  virtual ~Foresight() = default;

  // Finds the position. Returns whether it changed other than by moving forward.
  virtual bool look() { return false; }
  // When the program uses the node next, or NEVER. Asked only while there is a position.
  virtual int64_t next_use(Node*) const { return NEVER; }

  // Of the last look: whether there is a position in a recorded step, and which.
  bool predicts() const { return predicts_; }
  int64_t position() const { return position_; }
  // The distance of what is not used again: farther than any other.
  int64_t horizon() const { return horizon_; }

 protected:
  bool predicts_ = false;
  int64_t position_ = 0, horizon_ = 1;
};

}  // namespace dtrrun
