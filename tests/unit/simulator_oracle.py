"""A plain recursive replay that scans, written from App. C.4 and C.5 only for the tests."""

from dtrrun.simulator.schedule import CONSTANT


class Oracle:
    """h_dtr_local, lru or size by a linear scan, with sets and lists only."""

    def __init__(self, schedule, budget, heuristic, deallocation="eager"):
        self.schedule, self.budget, self.heuristic = schedule, budget, heuristic
        self.deallocation = deallocation
        self.memory = self.clock = self.evictions = self.recomputed = 0
        self.defined, self.pool, self.resident = set(), [], set()
        self.locks = [0] * len(schedule.nbytes)
        self.access = [0] * len(schedule.nbytes)
        self.made = []  # operators run so far: a storage's cost counts only these
        self.pinned, self.banished, self.waiting = set(), set(), set()

    def size(self, tensor):
        return 0 if self.schedule.is_alias(tensor) else self.schedule.nbytes[self.schedule.storage_of[tensor]]

    def tensors(self, storage):
        """Return the storage's tensors that exist so far."""
        all_of_it = [t for t, s in enumerate(self.schedule.storage_of) if s == storage]
        return [t for t in all_of_it if self.schedule.operator_of[t] in self.made]

    def cost(self, storage):
        by = {self.schedule.operator_of[t] for t in self.tensors(storage)}
        return sum(self.schedule.operators[one].cost for one in by)

    def score(self, storage):
        stale, size = max(self.clock - self.access[storage], 1), self.schedule.nbytes[storage]
        return {
            "h_dtr_local": lambda: self.cost(storage) / (size * stale),
            "lru": lambda: 1 / stale,
            "size": lambda: 1 / size,
        }[self.heuristic]()

    def run(self):
        for event in self.schedule.events:
            if event >= 0:
                self.made.append(event)
                operator = self.schedule.operators[event]
                self.compute(event, operator.outputs[0])
                for one in operator.outputs:
                    self.access[self.schedule.storage_of[one]] = self.clock
                if operator.name == CONSTANT:
                    self.pin(self.schedule.storage_of[operator.outputs[0]])
            elif self.deallocation == "banish":
                self.waiting.add(~event)
                self.banish_what_can_be()
            elif self.deallocation == "eager" and ~event in self.resident and ~event not in self.pinned:
                self.evict(~event)
        for one in self.schedule.outputs:
            if one not in self.defined:
                self.compute(self.schedule.operator_of[one], one)
                self.recomputed += 1
            self.pin(self.schedule.storage_of[one])

    def pin(self, storage):
        self.pinned.add(storage)
        self.locks[storage] += 1

    def evict(self, storage):
        self.evictions += 1
        self.resident.remove(storage)
        self.defined -= set(self.tensors(storage))
        self.memory -= self.schedule.nbytes[storage]
        if storage in self.pool:
            self.pool.remove(storage)

    def dependents(self, storage):
        """Yield the tensors of other storages that are computed from this one."""
        place = self.schedule.storage_of
        for number in self.made:
            operator = self.schedule.operators[number]
            if storage in {place[one] for one in operator.inputs}:
                yield from (t for t in operator.outputs if place[t] not in self.banished | {storage})

    def banish_what_can_be(self):
        again = True
        while again:
            again = False
            for storage in sorted(self.waiting):
                dependents = list(self.dependents(storage))
                if all(one in self.defined for one in dependents):
                    again = True
                    self.waiting.remove(storage)
                    self.banished.add(storage)
                    if storage in self.resident:
                        self.evict(storage)
                    for one in dependents:
                        self.pin(self.schedule.storage_of[one])

    def compute(self, number, wanted):
        operator = self.schedule.operators[number]
        storages = [self.schedule.storage_of[one] for one in operator.inputs]
        assert not self.banished & set(storages)
        for one in storages:
            self.access[one] = self.clock
        missing = [one for one in operator.inputs if one not in self.defined]
        for one, storage in zip(operator.inputs, storages, strict=True):
            self.locks[storage] += one in self.defined
        for one in missing:
            if one not in self.defined:
                self.compute(self.schedule.operator_of[one], one)
                self.recomputed += 1
            self.locks[self.schedule.storage_of[one]] += 1
        needed = sum(self.size(one) for one in operator.outputs)
        while self.memory + needed > self.budget:
            candidates = [one for one in self.pool if not self.locks[one]]
            if not candidates:
                raise MemoryError
            self.evict(min(candidates, key=self.score))
        self.clock += operator.cost
        self.memory += needed
        for one in [one for one in operator.outputs if one != wanted] + [wanted]:
            storage = self.schedule.storage_of[one]
            if one in self.defined or storage in self.banished:
                self.memory -= self.size(one)
                continue
            self.defined.add(one)
            if storage not in self.resident:
                self.resident.add(storage)
                if self.schedule.nbytes[storage]:
                    self.pool.append(storage)
        for storage in storages:
            self.locks[storage] -= 1
        self.banish_what_can_be()
