"""What `torch.compile` generates for a GPU: kernels in Triton's language, and a module that calls them."""

import pytest
import torch
from gpu_programs import DEVICE, HOLLOW, MIB, beside, forget
from torch import nn

import dtrrun

N = 1 << 20
SOURCE = '''
import torch
from torch._inductor.async_compile import AsyncCompile

empty_strided_cuda = torch._C._dynamo.guards._empty_strided_cuda
get_raw_stream = torch._C._cuda_getCurrentRawStream
async_compile = AsyncCompile()

sines = async_compile.triton("sines", """
@triton_heuristics.pointwise(
    triton_meta={
        'signature': {'in_ptr0': '*fp32', 'out_ptr0': '*fp32', 'xnumel': 'i32', 'XBLOCK': 'constexpr'},
    },
    inductor_meta={'mutated_arg_names': []},
)
@triton.jit
def sines(in_ptr0, out_ptr0, xnumel, XBLOCK : tl.constexpr):
    pass
""", device_str="cuda")

more = async_compile.triton("more", """
@triton_heuristics.pointwise(
    triton_meta={'signature': {'in_out_ptr0': '*fp32', 'xnumel': 'i32', 'XBLOCK': 'constexpr'}},
    inductor_meta={'mutated_arg_names': ['in_out_ptr0']},
)
@triton.jit
def more(in_out_ptr0, xnumel, XBLOCK : tl.constexpr):
    pass
""", device_str="cuda")

async_compile.wait(globals())
del async_compile

def call(args):
    arg0_1, = args
    args.clear()
    with torch.cuda._DeviceGuard(0):
        torch.cuda.set_device(0)
        buf0 = empty_strided_cuda((NUMBER, ), (1, ), torch.float32)
        stream0 = get_raw_stream(0)
        sines.run(arg0_1, buf0, NUMBER, stream=stream0)
        del arg0_1
        buf1 = buf0; del buf0  # reuse
        more.run(buf1, NUMBER, stream=stream0)
        buf2 = empty_strided_cuda((NUMBER, ), (1, ), torch.float32)
        sines.run(buf1, buf2, NUMBER, stream=stream0)
    return (buf1, buf2, )
'''.replace("NUMBER", str(N))


KERNELS = {"sines": lambda given, made, _: torch.sin(given, out=made), "more": lambda made, _: made.add_(1)}


class Stub:
    """Stands in for a kernel compiled by Triton, for machines without Triton."""

    def __init__(self, name, launched):
        self.name, self.launched = name, launched

    def run(self, *args, stream):
        assert stream == torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())
        self.launched.append(self.name)
        KERNELS[self.name](*args)


def test_launched_kernels_are_operators(gpu, monkeypatch):
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.codecache import PyCodeCache

    launched = []
    monkeypatch.setattr(AsyncCompile, "triton", lambda self, name, source, device_str: Stub(name, launched))
    key, path = PyCodeCache.write(SOURCE)

    def program():
        call = PyCodeCache.load_by_key_path(key, path).call
        kept = [call([torch.ones(N, device="cuda").mul(number)]) for number in range(1, 40)]
        return [one.sum().item() for pair in kept for one in pair]

    expected = program()
    PyCodeCache.cache_clear()
    calls = len(launched)
    budget = beside() + 96 * MIB + 14 * 4 * N
    forget()
    with dtrrun.budget(budget, device=DEVICE) as session:
        assert program() == expected
        report = session.report()
    assert report["compiled"] == {"graphs": 1, "kernels": 2, "opaque": 0}
    again = {row["name"].rpartition("_")[0]: row["rematerializations"] for row in report["operators"]}
    assert again["inductor_kernel.sines"] > 0
    assert len(launched) == 2 * calls + sum(again.get(f"inductor_kernel.{name}", 0) for name in KERNELS)


@pytest.mark.skipif(HOLLOW, reason="kernels in Triton's language need a real GPU")
def test_a_compiled_program_computes_the_same_bits(gpu):
    pytest.importorskip("triton")

    def train():
        torch._dynamo.reset()
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(1024, 1024), nn.BatchNorm1d(1024), nn.GELU()) for _ in range(12)]
        model = nn.Sequential(*layers, nn.Dropout(0.1)).cuda()
        run, optimizer = torch.compile(model), torch.optim.AdamW(model.parameters())
        losses = []
        for _ in range(3):
            loss = run(torch.randn(4096, 1024, device="cuda")).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, [one.double().sum().item() for one in model.state_dict().values()]

    expected = train()
    peak = torch.cuda.max_memory_allocated()
    budget = beside() + 96 * MIB + peak * 7 // 10
    forget()
    with dtrrun.budget(budget, device=DEVICE) as session:
        assert train() == expected
        report = session.report()
    assert report["rematerializations"]
    assert report["compiled"]["kernels"]
    assert not report["compiled"]["opaque"]
