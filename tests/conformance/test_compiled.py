"""Programs compiled by `torch.compile` compute the same bits as without dtrrun, compiled as well."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from programs import assert_same, in_memory, plain, run_inside
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.codecache import PyCodeCache
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.utils import BoxedBool
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

import dtrrun
from dtrrun.runtime.compiled import generated

WIDTH = 32


class Block(nn.Module):
    """Running statistics, random numbers, results side by side in one buffer, memory that is reused."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        hidden = F.dropout(torch.relu(self.norm(self.first(x))), 0.1)
        return x + self.last(torch.cat([hidden.sin(), hidden.cos()], 1))


def training():
    """Two steps with a compiled optimizer, too: a kernel of more than 32 arguments."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    optimizer = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)
    run, step = torch.compile(model), torch.compile(optimizer.step)
    losses = []
    for _ in range(2):
        loss = run(torch.randn(16, WIDTH)).square().mean()
        loss.backward()
        step()
        optimizer.zero_grad()
        losses.append(loss)
    return *losses, *model.state_dict().values(), torch.get_rng_state()


def inference():
    """Arguments that change, symbolic sizes, an operator that reads what a kernel has changed in place."""

    def change(x, y):
        x.add_(y.sin())
        torch._dynamo.graph_break()
        return torch.relu(x @ y).cumsum(0)

    compiled = torch.compile(change, dynamic=True)
    made = []
    for size in (8, 12):
        x, y = torch.randn(size, size) * 2, torch.randn(size, size) * 3
        made += [compiled(x, y), x]
    return made


class Broken(torch.autograd.Function):
    """A function that the compiler cannot trace: it compiles the parts when PyTorch calls them."""

    @staticmethod
    def forward(ctx, x):
        y = x.sin() * 2 + x
        torch._dynamo.graph_break()
        return (y.exp() + y).cos()

    @staticmethod
    def backward(ctx, grad):
        return (grad * 2 + grad.tanh()).sinh()


def called_back():
    x = torch.randn(64, 64).requires_grad_()
    torch.compile(lambda x: (Broken.apply(x * 1.5) + 1).relu().sum())(x * 1.0).backward()
    return x.grad


@pytest.fixture
def anew():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("program", "observed"),
    [(training, {}), (training, {"where": True}), (inference, {}), (called_back, {})],
    ids=["training", "modules observed", "inference", "called back"],
)
def test_a_compiled_program_computes_the_same_bits(program, observed, anew):
    with torch.no_grad() if program is inference else torch.enable_grad():
        expected = plain(program)
        graphs = counters["stats"]["unique_graphs"]
        torch._dynamo.reset()
        found, report = run_inside(program, 1, over_budget="evict", **observed)
    assert counters["stats"]["unique_graphs"] == 2 * graphs
    assert_same(expected, found, "with everything evicted")
    assert report["compiled"]["kernels"] >= 3
    assert not report["compiled"]["opaque"]
    assert counters["inductor"]["fxgraph_cache_hit"] >= 2  # graphs compiled without dtrrun are reused
    by_name = {row["name"] for row in report["operators"] if row["rematerializations"]}
    assert any(name.startswith("inductor_kernel.") for name in by_name)


def test_running_statistics_stay_for_what_was_computed_beside_them(anew):
    """They stay right even if memory runs short only after the statistics have changed."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU()) for _ in range(4))
    )
    compiled, x = torch.compile(model), torch.randn(512, 64)
    with dtrrun.budget(None, over_budget="evict") as session:
        loss = compiled(x).square().mean()
        session.set_budget(1)
        loss.backward()
        report = session.report()
    again = {row["name"] for row in report["operators"] if row["rematerializations"]}
    assert any("native_batch_norm" in name for name in again)


@pytest.mark.parametrize("strict", [True, False])
def test_no_guard_depends_on_the_session(strict, anew):
    """Storages of FakeTensors have symbolic sizes, and claim to be on a CPU."""

    def program():
        ends = torch.export.Dim("rows", min=2, max=64)
        exported = torch.export.export(Block(), (x,), dynamic_shapes=({0: ends},), strict=strict)
        traced = make_fx(lambda x: x.mul(2).add_(1).view(-1).relu(), tracing_mode="symbolic")(x)
        return exported.module()(x[:5]), [str(one.expr) for one in traced.shape_env.guards]

    x = torch.randn(8, WIDTH)
    found, _ = run_inside(program, 1, over_budget="evict")
    assert_same(plain(program), found, "exported")


def test_storages_for_shapes_take_no_memory():
    with dtrrun.budget(None) as session:
        x = torch.randn(1024)
        torch._enable_functionalization(reapply_views=True)
        made = torch._to_functional_tensor(x) + 1  # holds the result, and a storage beside it
        torch._disable_functionalization()
        before, calls = session.report()["resident_bytes"], session.interposer.native_calls
        with FakeTensorMode():
            number = torch.where(torch.empty(1024) > 0, torch.empty(1024).copysign(2.0), 2.0)
            made = made, made.untyped_storage(), number.untyped_storage()
        assert session.report()["resident_bytes"] == before
        assert session.interposer.native_calls == calls


def change(x):
    return torch.relu(x.add_(1)) + 1


def test_a_function_that_is_compiled_before_the_session(anew):
    compiled = torch.compile(change)

    def program():
        x = torch.randn(64, 64).sin()
        with torch.no_grad():
            return compiled(x), x * 2

    expected = plain(program)
    for _ in range(2):
        found, report = run_inside(program, 1, over_budget="evict")
        assert_same(expected, found, "under stress")
        assert report["compiled"]["graphs"] >= 1
    assert_same(expected, plain(program), "afterwards")


@pytest.mark.parametrize("first", ["outside", "inside"])
def test_a_graph_serves_in_a_session_and_outside(first, anew):
    """Its guards compare the thread's dispatch keys, to which a session adds one."""

    def use():
        # The session has met one of the two, and not the other.
        for x, y in ((torch.randn(8, 8), known), (known, torch.randn(8, 8))):
            compiled(x, y).sum().backward()

    layer, known = nn.Linear(8, 8), torch.randn(8, 8)
    compiled = torch.compile(lambda x, y: (layer(x) + y).sin(), backend="aot_eager", fullgraph=True)
    with contextlib.nullcontext() if first == "outside" else dtrrun.budget(None):
        use()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            use()
            with dtrrun.budget(None) as session:
                use()
                use()
            calls = session.report()["native"]
            assert calls["operators"] >= 4 * 5, "operators did not arrive"


def test_what_dynamo_does_not_look_into_is_the_same_when_it_compiles_and_later(anew):
    """Dynamo's guards compare the code of such functions."""
    compiled = torch.compile(lambda x: (torch.get_rng_state(), x.sin() * 2)[1])
    with torch._dynamo.config.patch(error_on_recompile=True), dtrrun.budget(None):
        for _ in range(3):
            compiled(torch.randn(8))


def test_a_graph_that_would_be_a_function_in_cpp_can_be_looked_into(anew):
    def program():
        with torch.no_grad():
            return torch.compile(change)(torch.randn(64, 64).sin())

    expected = plain(program)
    torch._dynamo.reset()
    with config.patch(cpp_wrapper=True):
        found, report = run_inside(program, 1, over_budget="evict")
    assert_same(expected, found, "under stress")
    assert report["compiled"]["graphs"]
    assert not report["compiled"]["opaque"]


def test_a_function_in_cpp_that_was_there_before_is_told_of(anew, capsys):
    with config.patch(cpp_wrapper=True), torch.no_grad():
        torch.compile(change)(torch.randn(64, 64))
    for count in range(2):
        with dtrrun.budget(None):
            pass
        assert capsys.readouterr().err.count("before this block began") == 1 - count


def test_cuda_graphs_are_off(capsys, monkeypatch):
    """Without a GPU: the test pretends that the graph was generated for one."""
    found = []
    monkeypatch.setattr(
        CompiledFxGraph,
        "post_compile",
        lambda graph, inputs, constants, graph_kwargs: found.append(graph_kwargs),
    )
    with dtrrun.budget(None):
        for device in ("cuda", "cuda", "cpu"):
            graph = SimpleNamespace(current_callable=torch.sin, device_types={device})
            CompiledFxGraph.post_compile(graph, (), {}, {"cudagraphs": BoxedBool(True)})
    assert [bool(one["cudagraphs"]) for one in found] == [False, False, True]
    assert capsys.readouterr().err.count("CUDA graphs") == 1


def test_what_nobody_can_look_into_runs_with_its_inputs_in_memory(anew, capsys, monkeypatch):
    def program():
        x = torch.randn(64, 64).sin()
        with torch.no_grad():
            return torch.compile(change)(x), x * 2

    expected = plain(program)
    torch._dynamo.reset()
    PyCodeCache.cache_clear()
    monkeypatch.setattr(
        generated, "read", lambda source: generated.Found(unknown="a graph of a kind of its own")
    )
    found, report = run_inside(program, 1, over_budget="evict")
    assert_same(expected, found, "under stress")
    assert report["compiled"] == {"graphs": 1, "kernels": 0, "opaque": 1}
    assert capsys.readouterr().err.count("cannot look into") == 1
    PyCodeCache.cache_clear()


@pytest.mark.parametrize("compile", ["auto", "eager"])
def test_compile_eager_compiles_nothing(compile, anew):
    compiles = []

    def backend(graph, inputs):
        compiles.append(graph)
        return graph.forward

    def program():
        compiled = torch.compile(lambda x: torch.sin(x) * 2, backend=backend, fullgraph=True)
        q = torch.sin(torch.randn(1, 2, 64, 16))
        x = torch.randn(8, 8).requires_grad_()
        made = torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)) if compile == "auto" else x
        made.sum().backward()
        return compiled(torch.randn(64, 32)), flex_attention(q, q, q), x.grad

    expected = plain(program)
    torch._dynamo.reset()
    compiles.clear()
    assert_same(expected, run_inside(program, 1, over_budget="evict", compile=compile)[0], "under stress")
    assert bool(compiles) == (compile == "auto")


def test_one_graph_in_too_small_a_budget(anew):
    """The error advises to run it eagerly, which needs no compilation, and less."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)) for _ in range(4)))
    compiled, x = torch.compile(model), torch.randn(512, 64)
    compiled(x).sum().backward()
    with pytest.raises(dtrrun.BudgetError, match=r'compile="eager"') as caught, dtrrun.budget("500kB"):
        compiled(x).sum().backward()
    assert "block.compile()" in caught.value.hint
    model.zero_grad()
    with dtrrun.budget("900kB", compile="eager") as session:
        compiled(x).sum().backward()
    report = session.report()
    assert report["evictions"] > 0
    assert not report["native"]["read_by_address"]
    assert not any("inductor" in row["name"] for row in report["native"]["calls"])


def test_what_the_compiler_looks_at_is_not_handed_out(anew):
    """It asks the inputs for their storages, as without dtrrun."""
    compiled = torch.compile(lambda x: x.sin() * 2, backend="aot_eager")
    with dtrrun.budget(None) as session:
        x = torch.randn(64, 64).cos()
        made = compiled(x)
        assert not {row["reason"] for row in session.report()["pinned"]} & {
            "handed out",
            "handed out to be read",
        }
        session.set_budget(made.nbytes)
        assert not in_memory(x)


def test_the_compiler_finds_pytorchs_own_functions():
    from dtrrun.runtime.patches.registry import installed, paused

    def found():
        return [
            (vars(owner).get(name), getattr(getattr(owner, name), "__code__", None)) for owner, name in places
        ]

    with dtrrun.budget(None):
        places = installed()
        inside = found()
        with paused():
            meanwhile = found()
            assert not hasattr(torch.Tensor.numpy, "__wrapped__")
        assert found() == inside
    replaced = [
        name for (_, name), one, other in zip(places, meanwhile, found(), strict=True) if one != other
    ]
    assert {*replaced} <= {
        *("compile", "__call__", "install_callbacks", "key_extractor"),
        "__init__",  # of what makes guards
        *("compile_fx", "compile_fx_inner", "load_by_key_path", "post_compile"),
    }
