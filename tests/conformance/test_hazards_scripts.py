"""TorchScript: a tracer must record what it records without dtrrun, and a script may change a list of
numbers that it has passed to an operator."""

import re

import pytest
import torch
from programs import chain, check_stress, mlp
from torch import nn

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),
]


# -- tracing -------------------------------------------------------------------------------------------------


def in_place(x):
    y = x.clone()
    y += 1
    y.mul_(2)
    y[0] = 7
    y[1:] += 3.5
    y.fill_(y.sum())
    return y.clamp_(max=5)


def numbers(x):
    whole = x.int()
    kinds = [x * 2.5 + 1, x * 2j, (whole + 1.5) * 2, whole // 3, 3 - x, 1 / x, x % 2, 2**x + x**2]
    return [*kinds, torch.where(x > 0, x, 0.5), torch.maximum(x, torch.tensor(1.0)), x.double() + 1]


def sizes(x):
    return x.view(x.size(0) * x.size(1)) * x.shape[0] + x.numel()


class Buffered(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = mlp(2)
        self.norm = nn.BatchNorm1d(32)
        self.register_buffer("shift", torch.arange(32.0) * 2)

    def forward(self, x):
        return (self.norm(self.layers(x) * 2 + self.shift)).relu() ** 2 + 1

    def other(self, x):
        return self.layers(x) - 1


def pasted(graph):
    """Return a graph as text, without the numbers that PyTorch gives to classes, and without source lines:
    for an operator inside a patched function, such as `tolist`, the line is dtrrun's."""
    return re.sub(r"___torch_mangle_\d+\.| #.*", "", str(graph))


def traced(function, **options):
    found = torch.jit.trace(function, torch.ones(4, 32), **options)
    return [pasted(found.graph), found.code, found(torch.full((4, 32), 2.0))]


def module():
    made = Buffered().eval()
    x = torch.ones(4, 32)
    methods = torch.jit.trace_module(made, {"forward": x, "other": x})
    frozen = torch.jit.freeze(torch.jit.trace(made, x))
    graphs = [pasted(one.graph) for one in (methods, frozen)]
    return [graphs, [one(x + 1) for one in (methods, frozen)], methods.other(x)]


def training():
    made = Buffered()
    found = torch.jit.trace(made, torch.ones(4, 32), check_trace=False)
    for step in range(3):
        found(torch.randn(4, 32) + step).sum().backward()
    return made, pasted(found.graph)


def exported():
    """Go as far as the exporter does without onnx."""
    exporter = pytest.importorskip("torch.onnx._internal.torchscript_exporter.utils")
    graph, parameters, _ = exporter._model_to_graph(Buffered().eval(), (torch.ones(4, 32),))
    return pasted(graph), parameters


def constants():
    """Use tensors that stand for numbers, taken from a graph."""
    found = torch.jit.trace(lambda x: x + 1.25, torch.ones(3))
    [number] = [
        node.t("value")
        for node in found.graph.nodes()
        if node.kind() == "prim::Constant" and node.kindOf("value") == "t"
    ]
    whole = torch.ones(2, dtype=torch.int64)
    kinds = [number + 1, whole * number, number.clone(), number.detach(), torch.stack([number, number])]
    kinds += [torch.copysign(whole, number), torch.maximum(whole, number), torch.cat([number.view(1)])]
    return [
        kinds,
        number.tolist(),
        number.item(),
        repr(number),
        float(number),
        whole[number.long().clamp(max=1)],
    ]


TRACED = {
    "numbers": lambda: traced(numbers),
    "in place": lambda: traced(in_place),
    "sizes": lambda: traced(sizes),
    "random": lambda: traced(lambda x: x + torch.rand_like(x) * 2 + torch.randn(32) + 1, check_trace=False),
    "branch": lambda: traced(lambda x: x + 1 if x.sum() > 0 else -x),
    "values": lambda: traced(lambda x: x * x.tolist()[0][0] + float(x.sum()), check_trace=False),
    "module": module,
    "training": training,
    "export": exported,
    "constants": constants,
}


@pytest.mark.parametrize("case", TRACED)
def test_tracing(case):
    def program():
        kept = chain(torch.sin(torch.randn(64, 32)), 4)
        return kept, TRACED[case](), kept[1] * 2

    check_stress(program, by_address=case == "export")  # the export writes tensors into a file, in C++


def test_a_tracer_sees_no_question_of_ours():
    """A write to a part of a tensor arrives with the tracer on, which would also record queries of sizes."""

    def program():
        kept = chain(torch.sin(torch.randn(64, 32)), 4)

        def function(x):
            y = kept[0] * x
            y[0] = x[0]
            y[1:] += kept[3][1:]
            return y.sum()

        return pasted(torch.jit.trace(function, torch.ones(64, 32)).inlined_graph), kept

    check_stress(program)


@torch.jit.script
def changed_dims(x: torch.Tensor, kept: list[torch.Tensor]):
    dims = [0]
    for _ in range(2):
        kept += [torch.flip(x, dims), x.sum(dims), torch.roll(x, dims, dims), torch.amax(x, dims)]
        dims[0] = dims[0] + 1
    dims[0] = 1
    dims.append(0)
    kept.append(torch.flip(x, dims))
    dims.clear()
    return kept


@torch.jit.script
def changed_numbers(x: torch.Tensor, kept: list[torch.Tensor]):
    size, scales, mask = [8, 8], [2.0, 2.0], [True, False, False]
    image = x.view(1, 1, 64, 32)
    for step in range(2):
        kept.append(torch.ops.aten._adaptive_avg_pool2d(image, size))
        kept.append(torch.ops.aten.upsample_nearest2d(image, None, scales))
        kept.append(x.new_full(size, 0.5))
        kept += torch.split(x, [32, 32])
        grads = torch.ops.aten.convolution_backward(
            image, image, torch.ones(1, 1, 1, 1), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, mask
        )
        kept.append(grads[step])
        size[0], scales[0], mask[1] = 4, 3.0, True
    return kept


@torch.jit.script
def changed_tensors(x: torch.Tensor, kept: list[torch.Tensor]):
    parts = [x, x.cos()]
    kept.append(torch.cat(parts))
    parts[0] = parts[1]
    kept.append(torch.stack(parts))
    parts.pop()
    index: list[torch.Tensor | None] = [torch.arange(8), None]
    kept.append(torch.ops.aten.index(x, index))
    index[0] = torch.arange(4)
    return kept


@pytest.mark.parametrize("script", [changed_dims, changed_numbers, changed_tensors])
@pytest.mark.parametrize("inference", [True, False])
def test_lists_that_a_script_changes(script, inference):
    def program():
        with torch.inference_mode(inference):
            x = torch.sin(torch.randn(64, 32))
            kept = [script(y, []) for y in chain(x, 4)]
            return kept, [torch.sin(x) for x in chain(x, 4)]

    check_stress(program)
