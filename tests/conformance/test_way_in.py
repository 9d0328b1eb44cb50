"""The way in: each operator comes to dtrrun, and then to the kernel that it would have without dtrrun."""

import subprocess
import sys

import pytest
import torch
from programs import chain, check_stress
from torch._dispatch.python import enable_python_dispatcher
from torch.nn import functional as F

import dtrrun
from dtrrun.extensions import build
from dtrrun.extensions.building import CannotBuild
from dtrrun.runtime.dispatch import arrivals

TABLES = """
import torch
import dtrrun
from dtrrun.extensions.build import KEY

SELECT = "BackendSelect"
WHERE = "CPU", "CUDA", "Meta"
DENSE = *WHERE, "QuantizedCPU", "QuantizedCUDA"  # these are below the key
ABOVE = "MkldnnCPU", *(kind + where for kind in ("Sparse", "SparseCsr", "NestedTensor") for where in WHERE)
CALLS_OPERATORS = "[math kernel]", "[nested kernel]", "[default backend kernel]"

def tables():
    return {
        name: dict(line.split(": ", 1) for line in torch._C._dispatch_dump_table(name).splitlines())
        for name in torch._C._dispatch_get_all_op_names()
    }

def first(table, *keys):
    return next((table[key] for key in keys if key in table and "fallthrough" not in table[key]), None)

before = tables()
with dtrrun.budget("1GB", device="cpu"):
    torch.ones(1).add(1)
after = tables()
assert len(after) > 3000
for name, table in after.items():
    plain = before.get(name) or table
    select = table[SELECT]
    schema = str(torch._C._get_schema(*(name + ".").split(".")[:2]))
    redispatches = "RegisterBackendSelect" in select and "Tensor" in schema.partition("->")[0]
    for backend in (*DENSE, *ABOVE):
        if first(plain, SELECT, backend) is None:
            continue
        order = (KEY, backend) if backend in DENSE else (backend, KEY)
        found = first(table, *order) if redispatches else first(table, SELECT, *order)
        if "by dtrrun" in found or (backend in ABOVE and found.endswith(CALLS_OPERATORS)):
            continue
        print(name, backend, found)
    for key in table:
        if "by dtrrun" not in table[key] and name.startswith("aten::") and table[key] != plain.get(key):
            print(name, key, "was", plain.get(key), "and is", table[key])
        if "by dtrrun" in table[key] and key not in (KEY, SELECT, "AutogradOther", *ABOVE):
            print(name, key)
"""


def test_each_operator_of_pytorch_arrives():
    """By the dispatcher's own tables, for all kinds of tensors. Beneath and above us, all is what it was."""
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", TABLES], capture_output=True, text=True)
    assert (ended.stderr, ended.stdout) == ("", "")


def test_a_composite_with_a_kernel_of_its_own():
    """Its parts would give other bits than the kernel for the device."""

    def program():
        x = torch.randn(64, 64, requires_grad=True)
        made = [F.mish(x), F.silu(x), F.channel_shuffle(x.reshape(1, 8, 8, 64), 4)]
        sum(one.square().sum() for one in made).backward()
        with torch.inference_mode():
            made += [F.channel_shuffle(x.detach().reshape(1, 8, 8, 64), 2), *chain(torch.randn(32, 32), 3)]
        return made, x.grad

    check_stress(program)


def test_what_is_hidden_from_modes_runs_while_the_dispatcher_is_in_python():
    """`torch.tensor(..., device="cuda")` does this while something is compiled."""
    hidden = torch._C.DispatchKeySet(torch._C.DispatchKey.Python)
    for name in ("Fake", "DeferredInit"):
        hidden = hidden | torch._C.DispatchKeySet(torch._C._parse_dispatch_key(name))
    with dtrrun.budget("1GB", device="cpu") as session:
        x = torch.ones(4) + 1
        before = session.report()["operators"]
        with enable_python_dispatcher(), torch._C._ExcludeDispatchKeyGuard(hidden):
            made = x.to(torch.float64), torch.full((4,), 2.0, dtype=torch.float64)
        assert session.report()["operators"] == before
    assert all(one.tolist() == [2.0] * 4 for one in made)


@pytest.mark.filterwarnings("ignore:Warning only once")
def test_a_composite_that_gets_a_kernel():
    def program():
        library = torch.library.Library("aten", "IMPL")
        x, made = torch.randn(32, 32), []
        for _ in range(2):
            made += [torch.square(x), *chain(torch.randn(32, 32), 3)]
            library.impl("square", lambda one: one * one * 2, "CPU", allow_override=True)
        with torch.inference_mode():
            made.append(torch.square(x.clone()))
        library._destroy()
        return [*made, torch.square(x)]

    check_stress(program)


TAKEN = f"""
import torch
library = torch.library.Library("_", "IMPL")
library.fallback(lambda op, *args, **kwargs: op(*args, **kwargs), {build.KEY!r})
import dtrrun
with dtrrun.budget("1MB"):
    pass
"""


def test_a_key_that_is_taken():
    ended = subprocess.run([sys.executable, "-c", TAKEN], capture_output=True, text=True)
    why, do = build.TAKEN
    last = ended.stderr.splitlines()[-1]
    assert (ended.returncode, last.partition(": ")[2]) == (1, f"{why.format(torch.__version__)}; {do}")


def other_name(x):
    return [("an operator", "aten::sub.Tensor", lambda: torch.ops.aten.add(x, x))]


def not_at_all(x):
    return [("an operator", "aten::add.Tensor", lambda: None)]


def with_another(x):
    return [("an operator", "aten::add.Tensor", lambda: x.add(x).mul(2))]


@pytest.mark.parametrize(
    ("cases", "received"),
    [
        (other_name, ("aten::sub.Tensor", "aten::add.Tensor")),
        (not_at_all, ("aten::add.Tensor", "nothing")),
        (with_another, ("aten::add.Tensor", "aten::add.Tensor, aten::mul.Tensor")),
    ],
)
def test_a_pytorch_that_hands_operators_on_in_another_way(extension, cases, received):
    """Before the first session of a process, some operators are called: if one is missed, a line says so."""
    arrivals.check(extension)
    with pytest.raises(CannotBuild) as raised:
        arrivals.check(extension, cases)
    assert raised.value.why == arrivals.CHANGED[0].format(torch.__version__, "an operator", *received)
