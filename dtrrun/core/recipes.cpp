#include "recipes.h"

namespace dtrrun {

void Recipes::make_constant(Version* one, Pin pin) {
  if (!one->constant()) {
    StorageRef content = ledger_.memory_of(one);
    one->each_dependent([&](Version* node) {
      Recorded* maker = maker_of(node);
      if (maker != nullptr && maker->secured) maker->hold().constants.push_back(content);
    });
    ledger_.decided(Decision::PINNED, one);
    if (ledger_.pressure) ledger_.policy->discard(one);
    set_operation(one, nullptr);
    if (one->has_left()) ledger_.constant_has_left(one);
    ledger_.add_constant(one);
  }
  if (one->pin == nullptr || one->pin == pins::COUNTED) one->pin = pin;
}

void Recipes::end_counting() {
  if (ledger_.census != nullptr) ledger_.census->backward = false;
  if (!ledger_.counting()) return;
  ledger_.census->counting = false;
  ledger_.backend.counting_ended();
  ledger_.settle();
  ledger_.some_unknown = ledger_.census_bytes > 0;
  for (Version* one : ledger_.versions.all()) {
    if (!one->constant()) make_constant(one, pins::COUNTED);
    if (one->pin == pins::UNINITIALISED) one->pin = pins::COUNTED;  // it may have been written to
  }
}

bool Recipes::secure(Version* wanted) {
  struct Frame {
    VersionRef node;
    uint32_t position = 0;
    std::vector<StorageRef> constants;
  };
  if (wanted->constant()) return false;
  if (maker_of(wanted)->secured) return true;
  std::vector<Frame> stack;
  stack.push_back({VersionRef(wanted), 0, {}});
  while (!stack.empty()) {
    Frame frame = std::move(stack.back());
    stack.pop_back();
    Version* node = frame.node.get();
    OperationRef maker(maker_of(node));
    if (!maker || maker->secured) continue;
    bool broken = false, deeper = false;
    for (; frame.position < maker->count; frame.position++) {
      Version* source = as_version(maker->reads[frame.position]);
      if (const Recorded* below = maker_of(source)) {
        if (below->secured) continue;
        stack.push_back(std::move(frame));
        stack.push_back({VersionRef(source), 0, {}});
        deeper = true;
        break;
      }
      StorageRef content = source->resident || source->host ? ledger_.memory_of(source) : StorageRef();
      if (content && source->escaped && !ledger_.backend.may_be_read(source)) content.reset();
      // A gradient is released soon: keeping it for a replay would take the memory that the eviction frees.
      if (!content || source->pin == pins::GRADIENT) {
        broken = true;
        break;
      }
      frame.constants.push_back(std::move(content));
    }
    if (deeper) continue;
    if (!broken) {
      settle(node, maker.get(), std::move(frame.constants));  // NOLINT(bugprone-use-after-move): moved only if deeper
    } else if (node->resident && !node->scratch) {
      make_constant(node, pins::INPUT_LOST);
    } else {  // neither resident nor replayable; nor are its dependents in the stack, up to a resident one
      lose(node);
    }
  }
  return !wanted->constant();
}

void Recipes::lose(Version* one) {
  ledger_.decided(Decision::LOST, one);
  if (ledger_.pressure) ledger_.policy->left(one);
  if (one->scratch) {
    if (ledger_.pressure) ledger_.policy->discard(one);
    ledger_.drop_scratch(one);
  }
  set_operation(one, nullptr);
}

VersionRef Recipes::supersede(Version* target, Recorded* maker, int64_t cost) {
  VersionRef made = ledger_.backend.successor(target);
  made->nbytes = target->nbytes;
  made->age = target->age;
  made->last_access = ledger_.clock;
  made->mutations = target->mutations + 1;
  made->extent = target->extent;
  made->escaped = target->escaped;
  made->period = target->period;
  made->fixed = target->fixed;
  target->superseded = true;
  Ledger::forget_host_copy(target);
  if (Constants::has(target)) ledger_.constants.remove(target);
  ledger_.use_copy(target);
  if (target->resident) target->escaped = false;  // no other code can reach the copy
  ledger_.backend.superseded(target, made.get());
  ledger_.versions.put(made.get());
  if (maker == nullptr) {
    made->pin = target->pin == nullptr ? pins::MUTATED : target->pin;
    ledger_.add_constant(made.get());
  } else {
    set_operation(made.get(), maker);
    made->cost = cost;
  }
  if (ledger_.pressure && !target->constant()) ledger_.policy->released(target);
  if (maker != nullptr) ledger_.evictable(made.get());
  return made;
}

VersionRef Recipes::half_written(const Version* target) {
  Version* current = ledger_.versions.find(target->key);
  return current == nullptr ? VersionRef() : supersede(current, nullptr, 0);
}

void Recipes::end() {
  std::unordered_set<Recorded*> seen;
  for (Version* one : ledger_.known()) {
    if (one->resident) Ledger::forget_host_copy(one);
    if (Recorded* maker = maker_of(one)) {
      if (!seen.insert(maker).second) continue;
      if (!maker->held) continue;
      maker->held->constants.clear();
      maker->keep({});
    } else {
      Ledger::give_back_copy(one);
      one->copy.reset();
      if (!one->scratch) continue;
      one->set_scratch(StorageRef());
      one->resident = false;
    }
  }
}

void Recipes::settle(Version* node, Recorded* maker, std::vector<StorageRef> constants) {
  if (!constants.empty()) maker->hold().constants = std::move(constants);
  maker->each_made(node, [&](int64_t, Version* output) {
    for (Node* read : *maker) note_dependent(as_version(read), output);
  });
  maker->secured = true;
}

void Recipes::note_dependent(Version* source, Version* node) {
  if (!source->needed_by) source->needed_by = std::make_unique<Dependents>();
  auto& dependents = *source->needed_by;
  if (dependents.empty()) dependents.reserve(4);
  dependents.emplace_back(node);
  size_t size = dependents.size();
  if ((size & (size - 1)) != 0 || size < 64) return;
  // A constant that is never mutated gathers dependents forever: drop the dead ones occasionally.
  dependents.erase(
      std::remove_if(dependents.begin(), dependents.end(), [](const WeakVersion& one) { return one.get() == nullptr; }),
      dependents.end());
}

}  // namespace dtrrun
