"""Settings around a program's operators (autocast, default dtype, flags, modes) hold in replays, too."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from programs import assert_same, check_stress, plain, run_inside
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


def square(rows=8):
    return torch.rand(rows, rows) - 0.5


COMPOSITES = {
    "einsum": lambda: torch.einsum("ij,jk->ik", square(), square()),
    "tensordot": lambda: torch.tensordot(square(), square(), 1),
    "multi_dot": lambda: torch.linalg.multi_dot([square(), square(), square()]),
    "inner": lambda: torch.inner(square(), square()),
    "cov": lambda: torch.cov(square()),
    "cdist": lambda: torch.cdist(square(30), square(30)),
    "matmul": lambda: torch.rand(5, 3, 8) @ torch.rand(8, 4),
    "pinv": lambda: torch.linalg.pinv(square()),
    "pinverse": lambda: torch.pinverse(square()),  # cast by autocast, which is off in the other
    "matrix_exp": lambda: torch.linalg.matrix_exp(square()),
    "gru": lambda: nn.GRU(8, 8)(torch.rand(5, 3, 8)),
    "lstm": lambda: nn.LSTM(8, 8)(torch.rand(5, 3, 8)),
    "rnn": lambda: nn.RNN(8, 8)(torch.rand(5, 3, 8)),
    "lstm_cell": lambda: nn.LSTMCell(8, 8)(square()),
    "bilinear": lambda: nn.Bilinear(8, 8, 4)(square(), square()),
    "attention": lambda: nn.MultiheadAttention(8, 2)(square(), square(), square()),
    "encoder": lambda: nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()(torch.rand(2, 5, 8)),
    "bicubic": lambda: nn.functional.interpolate(torch.rand(1, 3, 16, 16), scale_factor=1.7, mode="bicubic"),
    "stft": lambda: torch.stft(torch.rand(400), 64, window=torch.ones(64), return_complex=True),
    "svdvals": lambda: torch.linalg.svdvals(square(9)),
    "eigvalsh": lambda: torch.linalg.eigvalsh(square(9)),
    "cond": lambda: torch.linalg.cond(square(9)),
    "matrix_norm": lambda: torch.linalg.matrix_norm(square(9), 2),
    "nuclear_norm": lambda: torch.linalg.norm(square(9), "nuc"),
    "matrix_rank": lambda: torch.linalg.matrix_rank(square(9)),
    "svd": lambda: torch.svd(square(9), compute_uv=False),
}


def bfloat16():
    return torch.autocast("cpu", torch.bfloat16)


@contextmanager
def inference_autocast():
    with torch.inference_mode(), bfloat16():
        yield


CONTEXTS = {"inference": torch.inference_mode, "autocast": bfloat16, "both": inference_autocast}


@pytest.mark.parametrize("context", CONTEXTS)
def test_composites_have_the_bits_that_they_have_without_a_mode(context):
    def program():
        found = {}
        with CONTEXTS[context]():
            for name, compute in COMPOSITES.items():
                try:
                    found[name] = compute()
                except RuntimeError as error:  # this processor has no such kernel for bfloat16
                    found[name] = str(error)
        return found

    check_stress(program)


@pytest.fixture(scope="module")
def library():
    """Third-party operators whose kernels call PyTorch's operators."""
    with torch.library._scoped_library("dtrruntest", "FRAGMENT") as made:
        made.define("matmul(Tensor x, Tensor y) -> Tensor")
        made.impl("matmul", lambda x, y: x @ y, "CPU")
        made.define("doubled(Tensor x) -> Tensor")
        made.impl("doubled", lambda x: x @ torch.eye(len(x)) * 2, "CPU")
        yield torch.ops.dtrruntest


def test_autocast_within_an_operator_of_somebody_elses(library):
    def program():
        with bfloat16():
            first = library.matmul(square(), square())
            with torch.autocast("cpu", enabled=False):
                second = library.matmul(square(), square())
            with torch.autocast("cpu", torch.float16):
                third = library.doubled(square())
        return first, second, third, torch.get_autocast_dtype("cpu")

    check_stress(program)


def test_autocast_stays_off_below_a_mode_of_the_programs(library):
    class Passing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    def program():
        with bfloat16(), Passing():
            found = library.matmul(square(), square()), torch.linalg.pinv(square())
        with torch.inference_mode(), bfloat16(), Passing():
            return found, torch.inner(square(), square())

    check_stress(program)


def test_a_replay_has_the_default_dtype_of_the_first_run():
    def program():
        try:
            torch.set_default_dtype(torch.bfloat16)
            made = [torch.arange(2500) / 2500 + step for step in range(8)]
        finally:
            torch.set_default_dtype(torch.float32)
        again = [torch.arange(2500) / 2500 + step for step in range(8)]
        return made, again, torch.get_default_dtype()

    check_stress(program)


def test_room_is_made_for_results_of_the_default_dtype():
    def program():
        numbers = torch.arange(100_000)
        found = [numbers / 3]
        torch.set_default_dtype(torch.float64)
        try:
            found += [numbers / 3 for _ in range(4)]
        finally:
            torch.set_default_dtype(torch.float32)
        return [one.sum() for one in found]

    expected = plain(program)
    counted = run_inside(program, None)[1]["peak_bytes"]
    found, report = run_inside(program, int(counted * 0.8))
    assert_same(expected, found, "inside 80 %")
    assert report["peak_bytes"] <= int(counted * 0.8)


SMALL = torch.tensor([1e-39, 3e-40, 1.0])


def convolution():
    return nn.functional.conv2d(torch.rand(2, 8, 12, 12), torch.rand(8, 8, 3, 3))


@contextmanager
def flushed():
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@contextmanager
def threads():
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


SETTINGS = {
    "mkldnn": (lambda: torch.backends.mkldnn.flags(enabled=False), convolution),
    "denormals": (flushed, lambda: SMALL * 0.1),
    "threads": (threads, lambda: torch.rand(300_000).sum()),
    "grad mode": (torch.no_grad, lambda: torch.rand(9) * 2),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_replay_has_the_settings_of_the_first_run(name):
    setting, compute = SETTINGS[name]

    def program():
        with setting():
            inside = [compute() for _ in range(3)]
        outside = [compute() for _ in range(3)]
        with setting():  # uses what was made outside
            return [torch.stack(inside), torch.stack(outside), compute()]

    check_stress(program)


def test_a_replay_leaves_the_settings_as_they_are():
    def program():
        with torch.backends.mkldnn.flags(enabled=False), flushed(), threads(), torch.no_grad():
            kept = [convolution() for _ in range(3)]
        seen = []
        for one in kept:
            seen += [one.sum(), torch.backends.mkldnn.enabled, torch.get_num_threads()]
            seen += [torch.is_grad_enabled(), SMALL * 0.1]
        return seen

    check_stress(program)


@contextmanager
def deterministic(enabled, warn_only):
    before = determinism()
    torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def determinism():
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def unpooled():
    """Call an operator that fails, or warns, when algorithms must be deterministic."""
    return nn.functional.max_unpool2d(square()[None, None], torch.arange(64).view(1, 1, 8, 8), 2)


@pytest.mark.parametrize("later", [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("first", [(False, False), (False, True), (True, True)])
@pytest.mark.filterwarnings("ignore:max_unpool")
def test_a_replay_is_as_strict_about_determinism_as_the_first_run(first, later):
    def program():
        with deterministic(*first):
            kept = [unpooled() for _ in range(3)]
        with deterministic(*later):
            return [[one.sum(), determinism()] for one in kept]

    check_stress(program)


class Rounding(TorchDispatchMode):
    """Changes what operators compute."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return torch.ceil(result) if func is torch.ops.aten.sin.default else result


def rounded():
    kept = [torch.sin(torch.rand(500) * step) for step in range(5)]
    return [one * 2 for one in kept], sum(kept)


def test_a_mode_of_the_programs_around_the_session():
    with Rounding():
        expected = plain(rounded)
        for careful in (False, True):
            found, report = run_inside(rounded, 1, over_budget="evict", careful=careful)
            assert_same(expected, found, f"inside of a mode, careful={careful}")
            assert report["evictions"] > 0


class Listening(TorchDispatchMode):
    """Changes what one operator computes, which some composites call, and records what it sees."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        result = func(*args, **(kwargs or {}))
        return torch.ceil(result) if func is torch.ops.aten.erf.default else result


def test_a_mode_of_the_programs_around_the_session_gets_composites_whole_in_inference_mode():
    def program():
        x, out = square() * 1.0, torch.zeros(8, 8)
        with torch.inference_mode():
            before = len(mode.seen)
            found = [torch.special.ndtr(x), torch.inner(x, x), x.t().reshape(-1), torch.einsum("ij->ji", x)]
            found.append(torch.special.ndtr(x, out=out))
            return found, out, mode.seen[before:]

    with Listening() as mode:
        expected = plain(program)
        for careful in (False, True):
            found, _ = run_inside(program, None if careful else 1, over_budget="evict", careful=careful)
            assert_same(expected, found, f"inside of a mode, careful={careful}")


def test_a_mode_of_the_programs_within_the_session():
    def program():
        with Rounding():
            return rounded()

    check_stress(program)


def test_a_device_around_the_session():
    expected = plain(rounded)
    with torch.device("cpu"):
        found, report = run_inside(rounded, 1, over_budget="evict", careful=False)
    assert_same(expected, found, "inside of a device context")
    assert report["evictions"] > 0
