"""Random draws that are not obvious: generators by position, operators that are not PyTorch's."""

import sys
import threading

import pytest
import torch
from programs import assert_same, check, check_stress, plain, run_inside

import dtrrun
from dtrrun.runtime import rng

aten = torch.ops.aten


def rrelu_(x, own):
    return aten.rrelu_with_noise_(x - 0.5, torch.zeros_like(x), 0.1, 0.3, True, own)


def rrelu(x, own):
    noise = torch.zeros_like(x)
    return torch._C._nn.rrelu_with_noise(x - 0.5, noise, 0.1, 0.3, True, own), noise


BY_POSITION = {
    "poisson": lambda x, own: torch.poisson(x * 5, own),
    "poisson.out": lambda x, own: aten.poisson.out(x * 5, own, out=torch.zeros_like(x)),
    "binomial": lambda x, own: torch.binomial(torch.full_like(x, 9), x, own),
    "_standard_gamma": lambda x, own: torch._standard_gamma(x + 1, own),
    "_sample_dirichlet": lambda x, own: torch._sample_dirichlet(x + 1, own),
    "rrelu_with_noise": rrelu,
    "rrelu_with_noise_": rrelu_,
    "randn": lambda x, own: torch.randn(x.shape, generator=own),
    "normal_": lambda x, own: x.clone().normal_(generator=own),
}


@pytest.mark.parametrize("name", BY_POSITION)
def test_a_generator_that_is_given(name):
    def program():
        own = torch.Generator().manual_seed(3)
        x = torch.rand(64, 32)
        kept = [BY_POSITION[name](x, own) for _ in range(4)]
        return kept, torch.rand(3, generator=own), own.get_state()

    check_stress(program)


calls = [0]


def noisy(x):
    return x + torch.rand_like(x)


def sometimes(x):
    return x + torch.rand_like(x) if x.flatten()[0] > 0.5 else x + 1


def twice(x):
    return x * torch.rand(x.shape[-1]), torch.randn(x.shape)


def in_place(x):
    x.add_(torch.rand_like(x))


def given(x, own):
    return x + torch.rand(x.shape, generator=own) + torch.rand(1)


def reseeds(x):
    before = torch.get_rng_state()
    torch.manual_seed(5)
    made = x + torch.rand_like(x)
    torch.set_rng_state(before)
    return made


def counts(x):
    """Draw at every other call regardless of the input: the replay cannot do the same, but draws nothing."""
    calls[0] += x.device.type == "cpu"  # not when PyTorch calls it for a shape
    return x + 1 + 0 * torch.rand_like(x) if calls[0] % 2 else x + 1


def grows(x):
    """Depend on state that is not seen, since PyTorch's functions are taken to have none."""
    return torch.zeros(128 if torch._tensor_str.PRINT_OPTS.edgeitems == 3 else 256)


FOREIGN = {
    "noisy": ("noisy(Tensor x) -> Tensor", noisy),
    "sometimes": ("sometimes(Tensor x) -> Tensor", sometimes),
    "twice": ("twice(Tensor x) -> (Tensor, Tensor)", twice),
    "in_place": ("in_place(Tensor(a!) x) -> ()", in_place),
    "given": ("given(Tensor x, Generator? own) -> Tensor", given),
    "named": ("named(Tensor x, *, Generator own) -> Tensor", given),
    "reseeds": ("reseeds(Tensor x) -> Tensor", reseeds),
    "grows": ("grows(Tensor x) -> Tensor", grows),
    "counts": ("counts(Tensor x) -> Tensor", counts),
}


@pytest.fixture(scope="module", params=["CPU", "CompositeExplicitAutograd"])
def foreign(request):
    """Operators that draw, with a kernel for CPUs alone, or with one that PyTorch also calls for shapes."""
    with torch.library._scoped_library(f"dtrrun_test_draws_{request.param.lower()}", "DEF") as library:
        for name, (schema, kernel) in FOREIGN.items():
            library.define(schema)
            with dtrrun.budget(None):  # which has to know the kernels, or else what they make stays
                library.impl(name, kernel, request.param)
        yield getattr(torch.ops, library.ns)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", [name for name in FOREIGN if name != "grows"])
def test_an_operator_that_is_not_pytorchs(foreign, name, inference):
    operator = getattr(foreign, name)

    def program():
        calls[0] = 0
        own, kept = torch.Generator().manual_seed(3), []
        with torch.inference_mode(inference):
            for step in range(6):
                x = torch.rand(64, 32) + 0.1 * step
                if name in ("given", "named"):
                    kept += [operator(x, own=own), operator(x, own=torch.default_generator)]
                elif name == "in_place":
                    operator(x)
                    kept += [x, x * 2]
                else:
                    kept += [operator(x), operator(x[:3])]
        return kept, torch.rand(3, generator=own), own.get_state()

    check_stress(program)


def test_in_a_budget_that_binds(foreign):
    def program():
        x = torch.ones(64, 512)
        kept = [foreign.noisy(x + step) for step in range(8)]
        return [kept, [one * 2 for one in kept]]

    check(program)


@pytest.fixture
def often():
    """Make threads switch as often as Python allows."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_an_operator_that_draws_while_other_threads_do(foreign, often):
    """Threads may take turns in any order, but what comes back is what was made the first time."""
    with dtrrun.budget(1, over_budget="evict", verify=True) as session:
        kept = {}

        def work(place):
            for turn in range(20):
                kept[place, turn] = foreign.noisy(torch.zeros(64, 64)) * 2

        threads = [threading.Thread(target=work, args=(place,)) for place in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for tensor in kept.values():
            tensor.sum().item()
        assert session.report()["evictions"] > 0
        assert session.report()["mismatches"] == []


def test_a_replay_that_makes_other_bytes_is_an_error(foreign):
    """It would otherwise silently go into the program's storage."""
    with dtrrun.budget(1, over_budget="evict"):
        kept = foreign.grows(torch.ones(128))
        torch.ones(1).add(1)
        torch.set_printoptions(edgeitems=4)
        try:
            with pytest.raises(
                AssertionError, match=r"internal error: .*grows, run again, made 1024 bytes in place of 512"
            ):
                kept.sum()
        finally:
            torch.set_printoptions(profile="default")


def test_small_draws_share_the_state_of_the_generator():
    """Without sharing, 40,000 recipes of `torch.rand(300)` held 345 MB of states."""
    with dtrrun.budget("1GB") as session:
        capture, captured = session.interposer.capture, []
        session.interposer.capture = lambda *given: captured.append(capture(*given)) or captured[-1]
        kept = [torch.rand(300) for _ in range(2000)]
        assert len({id(state.start) for ((_, state),) in captured}) < 40
    assert len(captured) == len(kept) == 2000


@pytest.mark.parametrize("numel", [1, 7, 300, 623, 624, 625, 5_000, 70_000])
def test_draws_that_share_a_state_come_back(numel):
    def program():
        kept = []
        for step in range(60 if numel < 70_000 else 6):
            kept += [torch.rand(numel), torch.randn(3 + step % 20), torch.randint(9, (5,))]
            if step % 13 == 5:
                torch.manual_seed(step)
            if step % 7 == 0:
                kept.append(torch.randperm(9)[0].item())
        return kept

    expected = plain(program)
    found, report = run_inside(program, 1, over_budget="evict")
    assert_same(expected, found, "everything evicted")
    assert report["rematerializations"] > 10


def test_positions_of_generators_are_whole_states():
    own, other = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    kept = []
    for step in range(300):
        state = own.get_state()
        captured = rng.capture(torch.device("cpu"), own, 4 * step)
        kept.append((state, captured[0][1]))
        rng.capture(torch.device("cpu"), other, 0)
        torch.rand(step * 3, generator=own)
        if step % 3 == 0:
            torch.randn(5, generator=own)
        if step % 50 == 49:
            own.manual_seed(step)
    assert len({id(position.start) for _, position in kept}) < 60
    for state, position in kept:
        assert torch.equal(position.whole(), state)
