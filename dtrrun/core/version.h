// A version of a storage, with what more is known of it than the policy asks for.
#pragma once

#include <vector>

#include "policy/node.h"

namespace dtrrun {

struct Version : Node {
  int64_t key;        // of its storage, in the ledger's table
  int64_t mutations;  // since the storage was made
  int64_t extent;     // bytes of the storage that its first tensor reaches, -1 for all (only set under --verify)
  int64_t locks;      // above 0 while an operator needs it
  bool superseded;    // a later version has taken over the storage
  bool used;          // some recipe reads it
  bool escaped;       // other code may write to the memory unnoticed, now or later
};

inline Version* as_version(Node* node) { return static_cast<Version*>(node); }

// The present versions of all storages, in the order in which the storages came.
using VersionList = std::vector<Version*>;

// What the program has.
class Program {
 public:
  virtual ~Program() = default;
  // Whether it still holds the storage that a version has or had.
  virtual bool has_storage(const Version* version) const = 0;
  // Whether a constant is one of those that are expected to change.
  virtual bool is_weight(const Version* version) const = 0;

  bool has(const Version* version) const { return !version->superseded && has_storage(version); }
  // Whether there is memory that holds the version's bytes, if they are anywhere.
  bool has_place(const Version* version) const { return version->released || has(version); }
};

}  // namespace dtrrun
