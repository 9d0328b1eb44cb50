"""core.mutation, with stand-ins: what a constant's dependents need when it is about to change."""

from dtrrun.bindings import graph, make_policy
from dtrrun.core.dtr import DTR
from dtrrun.core.operator import Call
from dtrrun.simulator.snapshot import new_signature
from dtrrun.simulator.standins import OutOfBudget, StandInExecutor, StandInMemory, new_content

NBYTES = 4096


class Plain(Call):
    """An operator that makes one storage and writes to none."""

    def __init__(self, name, cost, versions):
        super().__init__()
        self.signature, self.cost, self.versions = new_signature(name, cost, NBYTES), cost, versions

    def made(self, nbytes):
        assert nbytes == NBYTES

    def recorded(self):
        return None


class Program:
    """Runs operators that each make one storage. Holds the results by name until they are released."""

    def __init__(self):
        self.dtr = DTR(
            make_policy("h_dtr_eq"),
            graph(),
            StandInMemory(),
            StandInExecutor(),
            budget_bytes=100 * NBYTES,
            budget_error=OutOfBudget,
            out_of_memory=OutOfBudget,
            device_type="ours",
            collect_garbage=None,
        )
        self.dtr.ledger.begin_pressure()
        self.contents = {"weight": new_content(NBYTES)}
        self.dtr.operators.adopt(self.contents["weight"]).pin = "parameter"

    def version(self, name):
        return self.dtr.ledger.versions[id(self.contents[name])]

    def run(self, name, *inputs, cost=10):
        call = Plain(name, cost, [self.version(one) for one in inputs])
        self.dtr.operators.admit(call)
        self.contents[name] = new_content(NBYTES)
        self.dtr.operators.finish(call, [(0, self.contents[name], "")])
        return self.version(name)

    def evict(self, name):
        assert self.dtr.eviction.evict_if_possible(self.version(name))

    def release(self, name):
        del self.contents[name]
        self.dtr.ledger.collect_dead()


def test_the_memory_of_one_dependent_lives_as_long_as_the_recipe_of_another():
    """The rescue reaches `result` before `middle`, whose memory only the recipe of `result` keeps alive."""
    program = Program()
    program.run("first", "weight")
    program.run("second", "weight")
    middle = program.run("middle", "first", cost=1000)
    result = program.run("result", "middle", "second")
    evicted = program.run("evicted", "middle", cost=1000)
    program.evict("evicted")
    program.evict("result")
    assert result.operation.kept_inputs == (middle(),)
    program.release("first")
    program.release("second")
    program.release("middle")
    # Restored by other means than its own rematerialization, which would release what was kept for it.
    program.dtr.ledger.restored(result)

    program.dtr.mutation.rescue_dependents(program.version("weight"))
    assert result.operation is None
    program.dtr.rematerializer.materialize((evicted,))
    assert evicted.resident
