"""Operators that are not PyTorch's, and native code that reads a tensor's memory without any operator."""

import ctypes
import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from programs import bits, chain, check, check_stress, in_memory

import dtrrun
from dtrrun.extensions import build, building

pytestmark = pytest.mark.usefixtures("extension")

SOURCE = Path(__file__).with_name("native_library.cpp")


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Return the path of the compiled library."""
    path = tmp_path_factory.mktemp("library") / "operators.so"
    recipe = build.recipe()
    flags = *recipe.units[0].flags, *recipe.linking
    command = [*building.compiler(), str(SOURCE), "-o", str(path), *flags]
    subprocess.run([argument.replace("-O2", "-O0") for argument in command], check=True)
    return path


@pytest.fixture(scope="module")
def operators(library):
    torch.ops.load_library(library)
    return torch.ops.dtrrun_tests


@pytest.fixture(scope="module")
def custom():
    """Operators in Python that use a table besides their arguments."""
    tables = {}

    @torch.library.custom_op("dtrrun_custom::rotate", mutates_args=())
    def rotate(x: torch.Tensor) -> torch.Tensor:
        return x * tables["factor"]

    rotate.register_autograd(lambda ctx, gradient: gradient * tables["factor"])

    @torch.library.custom_op("dtrrun_custom::add_to", mutates_args={"total"})
    def add_to(total: torch.Tensor, x: torch.Tensor) -> None:
        total.add_(x * tables["factor"])
        tables["calls"].add_(1)

    @torch.library.custom_op("dtrrun_custom::through_numpy", mutates_args=())
    def through_numpy(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(x.numpy() * 3).clone()

    yield rotate, add_to, through_numpy, tables
    tables.clear()


def test_a_custom_operator_reads_a_table_that_is_evicted_and_changes_later(custom):
    rotate, _, through_numpy, tables = custom

    def program():
        tables["factor"] = torch.randn(64, 32).sin()
        weight = torch.randn(64, 32, requires_grad=True)
        kept = chain(weight)
        early = rotate(kept[-1])
        kept += chain(early)
        tables["factor"].mul_(2)
        late = rotate(kept[-1])
        kept += [late, through_numpy(late.detach()), *chain(late)]
        sum(one.sum() for one in kept).backward()
        return [kept, weight.grad, tables.pop("factor")]

    check(program)


@pytest.mark.parametrize("foreign", [False, True])
def test_a_custom_operator_reads_a_small_table_from_before_the_session(custom, foreign):
    rotate, *_, tables = custom
    found = []
    for budget in (None, 1):
        table = np.full(32, 2, dtype=np.float32)
        tables["factor"] = torch.from_numpy(table) if foreign else torch.full((32,), 2.0)
        torch.manual_seed(0)
        with dtrrun.budget(budget, over_budget="evict"):
            kept = [rotate(torch.randn(64, 32))]
            kept += chain(kept[0])
            tables["factor"].mul_(3)
            kept += chain(torch.randn(64, 32))
            found.append(bits(kept))
    assert found[0] == found[1]


def test_a_custom_operator_writes_to_a_buffer_beside_its_arguments(custom):
    _, add_to, _, tables = custom

    def program():
        tables["factor"] = torch.randn(64, 32).sin()
        calls = tables["calls"] = torch.zeros(64, 32) + 1
        before = calls.exp()
        total = torch.randn(64, 32).exp()
        for _ in range(3):
            add_to(total, torch.randn(64, 32))
            chain(total)
        kept = chain(calls)
        calls.mul_(2)
        return [before, total, kept, tables.pop("calls"), tables.pop("factor")]

    check(program)


def test_a_composite_operator_of_a_library_writes_by_address(operators):
    def program():
        x = torch.randn(64, 32).sin()
        kept = [operators.column_max(x), *chain(x)]
        total = torch.zeros(64, 32) + 1
        seen = total.exp()
        kept += [operators.add_by_address(x, total), seen, total, *chain(total)]
        with torch.inference_mode():
            kept += [operators.column_max(x * 2), *chain(x)]
        return kept

    check(program)


def test_a_composite_operator_of_a_library_writes_to_tensors_of_its_own(operators):
    def program():
        x = torch.randn(64, 32).sin()
        kept = chain(x)
        for _ in range(3):
            kept += operators.through_tensors_of_its_own(kept[-1].sin())
            kept += chain(kept[-3])
        return kept

    check(program)


def test_a_parameter_that_is_written_by_address_is_no_longer_recomputed_from(operators):
    def program():
        total = torch.zeros(64, 32)
        early = total + 1  # perhaps evicted: its old value cannot be recovered
        operators.add_by_address(torch.randn(64, 32), total)
        return [chain(total), total, early[:0]]

    check_stress(program)


def test_a_backward_pass_of_a_library_writes_by_address(operators):
    def program():
        weight = torch.randn(64, 32, requires_grad=True)
        kept = chain(operators.doubled(operators.doubled(weight) + 1))
        gradients = []
        hidden = kept[-1]
        for _ in range(2):
            (gradient,) = torch.autograd.grad(hidden.sum(), weight, retain_graph=True)
            gradients.append(gradient * 1)
            chain(gradient)
        return [kept, gradients]

    check(program)


def test_an_operator_keeps_its_argument(operators):
    def program():
        operators.forget()
        x = torch.randn(64, 32).sin()
        operators.keep(x)
        del x
        kept = chain(torch.randn(64, 32))
        kept += [operators.plus_kept(kept[-1]), operators.times_kept(kept[-1])]
        kept += chain(kept[-1])
        operators.keep(torch.randn(64, 32).cos())
        kept += [operators.plus_kept(kept[-1]), *chain(kept[-1])]
        operators.forget()
        return kept

    check(program)


@pytest.mark.parametrize("met", [False, True])
def test_an_operator_reads_what_it_has_kept_since_before_the_session(operators, met):
    table = torch.full((64, 32), 2.0)
    operators.keep(table)
    with dtrrun.budget(1, over_budget="evict"):
        if met:
            chain(table)
        kept = chain(operators.times_kept(torch.randn(64, 32).sin()))
        expected = bits(kept)
        table.mul_(3)
        assert bits(kept) == expected
    operators.forget()


@torch.library.custom_op("dtrrun_plain_custom::shifted", mutates_args=())
def shifted(x: torch.Tensor) -> torch.Tensor:
    made = torch.zeros_like(x)
    made[0] = 2 * x[1] - torch.tensor(3.0) + torch.as_tensor([0.5] * 32)
    return made + torch.from_numpy(np.ones(32)).mul(0.5) + torch.arange(32.0)


@pytest.mark.parametrize("name", ["dtrrun_plain.halved", "dtrrun_plain_custom.shifted"])
def test_what_an_ordinary_operator_makes_can_still_be_evicted(operators, name):
    namespace, _, operator = name.partition(".")
    with dtrrun.budget(None) as session:
        x = torch.randn(64, 32)
        made = getattr(getattr(torch.ops, namespace), operator)(x)
        expected = bits(made)
        assert session.dtr.eviction.evict_if_possible(session.callbacks.version_of(made))
        assert not in_memory(made)
        assert bits(made) == expected
        assert session.report()["native"]["read_by_address"] == 0


def test_a_library_that_is_loaded_during_the_session(library):
    program = f"""
import torch, dtrrun
with dtrrun.budget(1, over_budget="evict", device="cpu"):
    torch.ops.load_library({str(library)!r})
    x = torch.randn(64, 32).sin()
    most = torch.ops.dtrrun_tests.column_max(x)
    torch.randn(64, 32).exp()
    assert torch.equal(most, x.max(0).values)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def packed_sequence(x):
    """Pack a sequence; its backward reads lengths that a hook has replaced by a tensor of the session."""
    rows = x.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda one: one + 0, lambda one: one):
        lengths = torch.arange(8, 0, -1)
        data = torch.nn.utils.rnn.pack_padded_sequence(rows.view(8, 8, 32), lengths).data.sin()
    chain(data)
    return [data, *torch.autograd.grad(data.sum(), rows)]


def eight_bits(x):
    """Multiply quantized matrices, which the threads of a parallel region read."""
    weight, offsets, scale, zero = torch.fbgemm_linear_quantize_weight(x)
    packed = torch.fbgemm_pack_quantized_matrix(weight)
    given = torch.randn(256, 32).sin()
    bias = torch.randn(64).sin()
    return torch.fbgemm_linear_int8_weight_fp32_activation(given, weight, packed, offsets, scale, zero, bias)


# PyTorch's own functions that read by address memory that no operator has brought back.
BY_ADDRESS = {
    "pack_padded_sequence": packed_sequence,
    "fbgemm_linear_int8_weight_fp32_activation": eight_bits,
    "choose_qparams_optimized": lambda x: torch.choose_qparams_optimized(x, x.numel(), 200, 0.16, 8),
    "sparse_coo_tensor": lambda x: torch.sparse_coo_tensor((x > 0).nonzero().t() * 1, x[x > 0]).to_dense(),
    "set_state": lambda x: torch.Generator().set_state(torch.get_rng_state() + 0).initial_seed(),
    "quantize_per_channel": lambda x: torch.quantize_per_channel(
        x, x[:, 0].abs() + 1, (x[:, 1] * 0).long(), 0, torch.qint8
    ).dequantize(),
}


@pytest.mark.parametrize("name", BY_ADDRESS)
def test_native_code_reads_an_evicted_tensor_by_its_address(name):
    def program():
        x = torch.randn(64, 32).sin()
        kept = chain(torch.randn(64, 32))
        return [BY_ADDRESS[name](x), *kept, *chain(x)]

    check_stress(program, by_address=True)


@pytest.mark.parametrize("name", ["sum_behind", "sums_behind", "sum_of_both"])
def test_native_code_reads_at_an_address_from_before_an_operator(library, name):
    function = getattr(ctypes.PyDLL(str(library)), name)
    function.restype = ctypes.c_float

    def call(*tensors):
        return function(ctypes.c_int64(2048), *map(ctypes.py_object, tensors[: 1 + name.startswith("sums")]))

    def program():
        x = torch.randn(64, 32).sin()
        y = torch.randn(64, 32).cos()
        kept = [call(y, x), call(x, y)]  # first with the tensor to be read in memory, then with it evicted
        kept += chain(x) + chain(y)
        return [*kept, call(x, y), x, y]

    check_stress(program, by_address=True)


@pytest.fixture(scope="module")
def extension(library):
    """The same library, as a module."""
    return importlib.util.module_from_spec(importlib.util.spec_from_file_location("operators", library))


def test_functions_that_python_calls_directly(extension):
    functions = dict(vars(extension))

    def program():
        weight = torch.randn(64, 32, requires_grad=True)
        x = weight.sin()
        with torch.no_grad():
            kept = [extension.doubled_by_address(x.cos())]
        chain(x)
        total = torch.zeros(64, 32)
        early = total + 1
        for step in range(3):
            extension.add_to_first(total, kept[0])
            kept += [total.exp(), extension.sine_of_sum([x, total * step], scale=x.detach())]
            chain(total)
        kept[-1].sum().backward()
        return [kept, early, x, total, weight.grad]

    with dtrrun.budget(1, over_budget="evict"):
        pass  # the extension is loaded when the session begins
    check(program)
    assert {name: vars(extension)[name] for name in functions} == functions
    assert extension.add_to_first.__name__ == "add_to_first"
    with dtrrun.budget("1MB"), pytest.raises(TypeError, match="tensors"):
        extension.sine_of_sum()


def test_a_custom_operator_calls_such_functions(extension):
    @torch.library.custom_op("dtrrun_extension::doubled", mutates_args=())
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return extension.doubled_by_address(x)

    @torch.library.custom_op("dtrrun_extension::add", mutates_args={"total"})
    def add(total: torch.Tensor, x: torch.Tensor) -> None:
        extension.add_to_first(total, x)

    def program():
        x, total = torch.randn(64, 32).sin(), torch.zeros(64, 32)
        kept = [doubled(x), total + 1]
        for _ in range(3):
            add(total, doubled(x))
            kept += [total.exp(), *chain(total, 2)]
        return [kept, x, total]

    check(program)


def test_an_extension_is_found_when_it_is_loaded_and_when_the_session_begins(library):
    program = f"""
import gc, importlib.util, os, sys, torch, torch._dynamo, dtrrun

def load():
    global extension
    spec = importlib.util.spec_from_file_location("operators", {str(library)!r})
    extension = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(extension)

def load_hidden():
    load()
    del sys.modules["operators"]

def load_frozen():
    load()
    gc.freeze()

for before, after in (load_hidden, int), (load_frozen, int), (int, load_hidden):
    if os.fork():
        assert os.wait()[1] == 0
        continue
    before()
    session = dtrrun.budget(1, over_budget="evict", device="cpu")
    session.__enter__()
    after()
    x = torch.randn(64, 32).sin()
    twice = extension.doubled_by_address(x)
    torch.randn(64, 32).exp()
    assert torch.equal(twice, 2 * x)
    session.__exit__(None, None, None)
    os._exit(0)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_threads_of_a_parallel_region_read_an_evicted_tensor():
    program = """
import torch, dtrrun
from test_hazards_native_code import eight_bits

def program():
    torch.manual_seed(0)
    weight = torch.randn(64, 32).sin()
    return eight_bits(weight)

expected = program().tolist()
with dtrrun.budget(1, over_budget="evict", device="cpu") as session:
    assert program().tolist() == expected
    assert session.report()["native"]["read_by_address"] > 0
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "PYTHONPATH": str(SOURCE.parents[2])}
    subprocess.run([sys.executable, "-c", program], check=True, cwd=SOURCE.parent, env=environment)


def test_memory_that_is_read_by_address_is_the_same_from_then_on():
    """Native code that kept the address of an evicted tensor can read and write there."""
    address_of = torch._C.TensorBase.data_ptr  # unpatched
    with dtrrun.budget(None) as session:
        x = torch.arange(1 << 20).sin()
        expected = x.tolist()[4095]
        y = x.exp()
        assert session.dtr.eviction.evict_if_possible(session.callbacks.version_of(x))
        assert not in_memory(x)
        address = address_of(x)
        memory = (ctypes.c_float * (1 << 20)).from_address(address)
        assert memory[4095] == pytest.approx(expected)
        memory[0] = 5
        assert in_memory(x)
        assert address_of(x) == address
        assert x[0].item() == 5
        assert session.report()["native"]["read_by_address"] == 1
        pinned = {one["reason"]: (one["bytes"], one["storages"]) for one in session.report()["pinned"]}
        assert pinned["read by address"] == (4 << 20, 1)
        before = session.report()["resident_bytes"]
        del x
        assert session.report()["resident_bytes"] == before - (4 << 20)
    assert y[0].item() == 1


def test_memory_that_is_read_by_address_while_another_thread_computes_with_it():
    """It is moved to the address that was read, but not while a kernel is reading it."""
    address_of = torch._C.TensorBase.data_ptr  # unpatched
    find = ctypes.CDLL(None).memchr  # releases the GIL
    find.argtypes = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
    weight = torch.randn(800, 800)
    with dtrrun.budget(None) as session:
        thread = threading.Thread(target=lambda: (weight @ weight).sin())
        thread.start()  # from now on threads take turns
        thread.join()
        for step in range(8):
            x = (weight @ (weight + step)) @ weight
            expected = x @ weight
            assert session.dtr.eviction.evict_if_possible(session.callbacks.version_of(x))
            address = address_of(x)
            thread = threading.Thread(
                target=lambda address=address: time.sleep(0.005) or find(address, 0, 800 * 800 * 4)
            )
            thread.start()
            assert torch.equal(x @ weight, expected)
            thread.join()


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="ends the process by itself, without dtrrun")
def test_an_operator_is_defined_anew_or_removed():
    """Its results can no longer be recomputed, nor can what was computed from those that are gone."""

    def define(factor):
        @torch.library.custom_op("dtrrun_anew::scaled", mutates_args=())
        def scaled(x: torch.Tensor) -> torch.Tensor:
            return x * factor

        return scaled

    def program():
        x = torch.randn(64, 32).sin()
        kept = []
        for factor in (2, 5):
            scaled = define(factor)
            kept += [scaled(x), *chain(scaled(x).sin())[1:]]
            chain(x)
        with torch.library._scoped_library("dtrrun_removed", "DEF") as library:
            library.define("shifted(Tensor x) -> Tensor")
            library.impl("shifted", lambda x: x + 3, "CPU")
            shifted = torch.ops.dtrrun_removed.shifted
            kept += [shifted(x), *chain(shifted(kept[3]).cos())[1:]]
            chain(x)
        with torch.library._scoped_library("aten", "IMPL") as library:
            kept += [torch.erf(x), *chain(torch.erf(kept[4]) + 1)[1:]]
            library.impl("erf", lambda x: x * 7, "CPU")
            kept += [torch.erf(x), *chain(torch.erf(kept[4]) + 1)[1:]]
            chain(x)
        library = torch.library.Library("dtrrun_forgotten", "DEF")
        library.define("doubled(Tensor x) -> Tensor")
        library.impl("doubled", lambda x: x * 2, "CPU")
        kept += [torch.ops.dtrrun_forgotten.doubled(x)]
        del library
        scaled.register_kernel("cpu")(lambda x: x * 11)
        kept += [scaled(x), *chain(scaled(x).sin())[1:]]
        with scaled.set_kernel_enabled("cpu", enabled=False):
            kept += [scaled(x), *chain(scaled(x).sin())[1:]]
        chain(x)
        return [*kept, torch.erf(x), *chain(x)]

    check(program)


def test_what_cannot_be_brought_back_ends_with_a_line_that_says_why():
    program = """
import ctypes, torch, dtrrun
with dtrrun.budget("13MB", device="cpu") as session:
    x = torch.arange(1 << 20).float().sin()
    assert session.dtr.eviction.evict_if_possible(session.callbacks.version_of(x))
    address = torch._C.TensorBase.data_ptr(x)
    kept = torch.empty(2 << 20)
    ctypes.c_float.from_address(address).value
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == -11
    assert (
        "dtrrun: error: native code reads the memory of an evicted tensor without an operator" in done.stderr
    )
    assert "too small" in done.stderr
    assert "session.pin(tensor)" in done.stderr


CRASHES = {
    "before": ("faulthandler.enable()", "", 1),
    "within": ("", "faulthandler.enable(); look()", 1),
    "both": ("faulthandler.enable()", "faulthandler.enable(); look()", 1),
    "again": (
        "",
        "enable = faulthandler.enable; enable(); look(); faulthandler.disable(); enable(); look()",
        1,
    ),
    "disabled": ("", "faulthandler.enable(); look(); faulthandler.disable(); look()", 0),
    "default": ("faulthandler.enable()", "signal.signal(signal.SIGSEGV, signal.SIG_DFL); look()", 0),
}
"""What a program does before and within a session, and how many tracebacks its crash prints."""

CRASHING = """
import ctypes, faulthandler, json, os, signal, sys, torch, dtrrun
found = {}
for name, (before, within, _) in json.loads(sys.argv[1]).items():
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.dup2(write, 2)
        signal.alarm(20)
        exec(before)
        with dtrrun.budget("9MB", device="cpu") as session:
            look = session.interposer.look  # as it does a few times a second: our handler is the first again
            exec(within)
            torch.ones(3)
            ctypes.string_at(8)
    os.close(write)
    text, status = open(read).read(), os.waitpid(child, 0)[1]
    found[name] = status, text.count("Fatal Python error: Segmentation fault"), text.count("dtrrun:")
print(json.dumps(found))
"""


def test_a_crash_of_the_programs_own_is_still_one():
    """It is told once, by whichever handler the program has installed, and when."""
    words = [sys.executable, "-c", CRASHING, json.dumps(CRASHES)]
    done = subprocess.run(words, capture_output=True, text=True)
    found = json.loads(done.stdout)
    assert {name: count for name, (_, count, _) in found.items()} == {
        name: count for name, (_, _, count) in CRASHES.items()
    }
    for name, (status, _, ours) in found.items():
        assert (os.WTERMSIG(status), ours) == (signal.SIGSEGV, 0), name


def test_a_storage_that_was_taken_before_the_session():
    """What the program reads and writes through it is unseen."""

    def program(buffer, handle):
        buffer.fill_(1.5)
        doubled = buffer * 2
        kept = chain(torch.randn(64, 32))
        size, handle_bytes = handle.nbytes(), handle[:4]
        handle.fill_(0)
        return [buffer, doubled, kept, *chain(buffer), size, list(handle_bytes)]

    def outside():
        buffer = torch.zeros(64, 32)
        return buffer, buffer.untyped_storage()

    torch.manual_seed(0)
    expected = bits(program(*outside()))
    for budget in (1, None):
        given = outside()
        torch.manual_seed(0)
        with dtrrun.budget(budget, over_budget="evict") as session:
            assert bits(program(*given)) == expected
            assert session.report()["evictions"] > 0 or budget is None


def test_a_scripted_module_is_saved_with_buffers_that_were_evicted(tmp_path):
    class Encoding(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.arange(2048.0).sin())

        def forward(self, x):
            return x + self.table

    with dtrrun.budget(1, over_budget="evict") as session:
        module = torch.jit.script(Encoding())
        chain(torch.randn(64, 32))
        assert not in_memory(module.table)
        torch.jit.save(module, tmp_path / "module.pt")
        chain(torch.randn(64, 32))
        buffer = io.BytesIO()
        torch.jit.save(module, buffer)
        buffer.seek(0)
        saved = torch.jit.load(tmp_path / "module.pt"), torch.jit.load(buffer)
        assert all(torch.equal(one.table, module.table) for one in saved)
        assert session.report()["native"]["read_by_address"] == 0


def test_a_session_that_is_over_holds_no_storage():
    """Otherwise the next would take weights for storages the program holds, and evict no results of them."""
    weight = torch.randn(64, 32, requires_grad=True)
    sessions = []
    for _ in range(2):
        with dtrrun.budget(1, over_budget="evict") as session:
            kept = chain(weight * 2)
            sum(one.sum() for one in kept).backward()
            sessions.append(session)
            assert not session.callbacks.version_of(weight).escaped
            assert session.report()["evictions"] > 0
