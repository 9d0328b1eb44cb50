"""Kernels in Python that read something of the program's besides their arguments, which changes later."""

import functools
import itertools
import os
import random
import threading
import time
import types

import numpy as np
import pytest
import torch
from programs import assert_same, chain, check_stress, plain, run_inside

from dtrrun.runtime.dispatch.kernels import Reading

READS_STATE = "made by an operator that reads state of the program"


SPACE = "dtrrun_state"
EPSILON = 0.25
number = 1.0
table = {"number": 1.0, "list": [1.0]}
settings = types.SimpleNamespace(scale=1.0)
shape = torch.sin
lock = threading.Lock()
steps = itertools.count()


class Config:
    scale = 1.0

    @property
    def computed(self):
        return table["number"]


config = Config()


def helped(x):
    return x * number


def decorated(function):
    @functools.wraps(function)
    def call(x):
        return function(x) * table["number"]

    return call


def counting():
    count = 0

    def count_up(x):
        nonlocal count
        count += 1
        return x * count

    return count_up


def setting(x):
    global number
    number += 0.0
    return x * number


def with_lock(x):
    with lock:
        return x * 1.5


def scaled_by(factor):
    return lambda x: x * factor


def importing(x):
    from math import cos

    return x * cos(EPSILON)


PURE = {
    "constant": lambda x: torch.sin(x) * EPSILON,
    "closure": scaled_by(0.5),
    "library": lambda x: torch.nn.functional.gelu(x) + torch.ops.aten.cos.default(x),
    "import": importing,
    "partial": functools.partial(torch.mul, other=3.0),
    # What these read changes. A replay puts it back.
    "number": lambda x: x * number,
    "helper": lambda x: sum(helped(one) for one in (x, x)),
    "object": lambda x: x * settings.scale,
    "class": lambda x: x * Config.scale,
    "attribute": lambda x: x * helped.scale,
    "function": lambda x: shape(x),
}
STATEFUL = {
    "item": lambda x: x * table["number"],
    "list": lambda x, of=table["list"]: x * of[0],
    "property": lambda x: x * config.computed,
    "decorator": decorated(torch.sin),
    "nonlocal": counting(),
    "global": setting,
    "random": lambda x: x * random.Random(7).random() + 0 * random.random(),
    "time": lambda x: x + 0 * time.time(),
    "environment": lambda x: x * float(os.environ.get("DTRRUN_TEST_SCALE", "1")),
    "iterator": lambda x: x * next(steps),
    "lock": with_lock,
    "method": table["list"].copy and (lambda x, bound=table["list"].copy: x * bound()[0]),
}
LIBRARY = torch.library.Library(SPACE, "DEF")
by_pybind = torch._C._autograd._enable_record_function
BY_LIBRARY = {"library item": STATEFUL["item"], "library number": PURE["number"]}


def operators():
    """Return the operators by name. Those of the library are registered during the session."""
    made = {}
    for name, body in {**PURE, **STATEFUL}.items():

        def kernel(x: torch.Tensor) -> torch.Tensor:
            raise NotImplementedError

        custom = torch.library.custom_op(f"{SPACE}::{name}_", kernel, mutates_args=())
        custom._init_fn = body
        custom.register_kernel("cpu")(body)
        made[name] = custom
    return made


def changed(to):
    global number, shape
    number = table["number"] = settings.scale = Config.scale = helped.scale = float(to)
    table["list"][0] = float(to)
    shape = (torch.sin, torch.cos)[to % 2]
    os.environ["DTRRUN_TEST_SCALE"] = str(to)


def program_of(made):
    def program():
        global steps
        steps = itertools.count()
        STATEFUL["nonlocal"].__closure__[0].cell_contents = 0
        changed(1)
        x = torch.randn(64, 32)
        kept = []
        for step in range(3):
            changed(step + 1)
            for one in made.values():
                kept += chain(one(torch.sin(x)), 1)
        return kept

    return program


def test_a_replay_sees_what_the_kernel_saw_or_the_results_stay():
    made = operators()
    program = program_of(made)
    report = check_stress(program, host=False)
    evicted = {one["name"] for one in report["operators"] if one["evictions"]}
    pinned = {one["reason"]: one["storages"] for one in report["pinned"]}
    assert {name for name in made if f"{SPACE}.{name}_" in evicted} == set(PURE)
    assert pinned[READS_STATE] > 2 * len(STATEFUL)


@pytest.mark.parametrize(
    "kernel", [lambda x: by_pybind(x), lambda x: np.add(x, 1), lambda x: int.from_bytes(x, "big")]
)
def test_code_that_is_not_pythons_is_taken_to_be_pure(kernel):
    assert Reading([kernel]).pure


@pytest.mark.parametrize("name", BY_LIBRARY)
def test_kernels_of_a_library_that_is_defined_during_the_session(name):
    defined = name.replace(" ", "_")

    def program():
        with torch.library._scoped_library(SPACE + defined, "DEF") as library:
            library.define("op(Tensor x) -> Tensor")
            library.impl("op", BY_LIBRARY[name], "CPU")
            return program_of({name: getattr(torch.ops, SPACE + defined).op})()

    expected = plain(program)
    found, report = run_inside(program, 1, over_budget="evict")
    assert_same(expected, found, name)
    evicted = {one["name"] for one in report["operators"] if one["evictions"]}
    assert (f"{SPACE}{defined}.op" in evicted) == (name == "library number")


@torch.library.custom_op(f"{SPACE}::grow", mutates_args={"total"})
def grow(total: torch.Tensor, x: torch.Tensor) -> None:
    total += x * table["number"]


def test_a_kernel_of_theirs_in_place_of_one_of_pytorchs():
    """The operator has run before, and does so again once the kernel is gone."""

    def program():
        x = torch.rand(64, 32)
        kept = [torch.erf(x)]
        with torch.library._scoped_library("aten", "IMPL") as library:
            library.impl("erf", lambda x: x * table["number"], "CPU")
            for step in range(3):
                changed(step + 1)
                kept += chain(torch.erf(x), 1)
        return kept, torch.erf(x), *chain(x, 2)

    expected = plain(program)
    found, report = run_inside(program, 1, over_budget="evict")
    assert_same(expected, found, "under stress")
    assert READS_STATE in {one["reason"] for one in report["pinned"]}


def test_a_kernel_that_writes_to_an_argument():
    def program():
        kept = []
        for step in range(3):
            changed(step + 1)
            total = torch.zeros(64, 32) + step
            grow(total, torch.ones(64, 32).sin())
            kept += chain(total, 2)
        return kept

    check_stress(program)
