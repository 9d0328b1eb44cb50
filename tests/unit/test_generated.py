"""Generated modules, as inductor writes them: which kernels they have, and how buffers are reused."""

import textwrap

import pytest

from dtrrun.runtime.compiled import generated

CPP = '''
update = async_compile.cpp_pybinding(['float*', 'const float*', 'float*', 'const int64_t', 'double'], r"""
extern "C" void kernel(float* in_out_ptr0, const float* in_ptr0, float* out_ptr1,
                       const int64_t ks0, double scale)
{ in_out_ptr0[0] = in_ptr0[0]; }
""")
'''
OWN = '''
reduce = async_compile.cpp_pybinding(['float*', 'const float*'], r"""
extern "C" void kernel(float* in_out_ptr0, const float* in_ptr0)
{ auto out_ptr0 = in_out_ptr0; }
""")
'''
TRITON = """
fused = async_compile.triton('fused', '''
@triton_heuristics.pointwise(
    size_hints={'x': 4096},
    triton_meta={'signature': {
        'in_ptr0': '*fp32', 'in_out_ptr0': '*fp32', 'given': '*i64', 'changed': '*fp32', 'out_ptr1': '*bf16',
        'scale': 'fp32', 'xnumel': 'i32', 'XBLOCK': 'constexpr'},
                 'device': DeviceProperties(type='cuda')},
    inductor_meta={'mutated_arg_names': ['in_out_ptr0', 'changed'], 'kernel_name': 'fused'},
)
@triton.jit
def fused(in_ptr0, in_out_ptr0, given, changed, out_ptr1, scale, xnumel, XBLOCK : tl.constexpr):
    pass
''', device_str='cuda')
"""


@pytest.mark.parametrize(
    ("source", "name", "arguments", "updated"),
    [
        (CPP, "update", "wrwif", (True, False, False, False, False)),
        (OWN, "reduce", "wr", (False, False)),  # it updates only what it computed itself
        (TRITON, "fused", "rwrwwfi", (False, True, False, True, False, False, False)),
    ],
)
def test_what_a_kernel_does_with_its_arguments(source, name, arguments, updated):
    found = generated.read(source)
    assert not found.unknown
    assert list(found.kernels) == [name]
    assert (found.kernels[name].arguments, found.kernels[name].updated) == (arguments, updated)
    assert generated.read(source.replace("ptr0", "ptr7")).kernels[name].digest != found.kernels[name].digest


@pytest.mark.parametrize(
    "source",
    [
        CPP.replace("'double'", "'Handle'"),
        CPP.replace("cpp_pybinding", "halide"),
        "from torch._inductor.codecache import CppWrapperCodeCache\n",
        TRITON.replace("'fp32', 'xnumel'", "'tensordesc', 'xnumel'"),
    ],
)
def test_what_is_not_known_is_said(source):
    assert generated.read(source).unknown


def call(*lines: str) -> str:
    body = textwrap.indent("\n".join(lines), "    ")
    return f"{CPP}{OWN}del async_compile\ndef call(args):\n{body}\ndef get_args():\n    pass\n"


def rewritten(*lines: str) -> list[str] | None:
    source = call(*lines)
    text = generated.with_new_buffers(source, generated.read(source).kernels)
    if text is None:
        return None
    found = text.split("\n")
    assert found.index("def call(args):") == source.split("\n").index(
        "def call(args):"
    )  # line numbers do not change
    return [line.strip() for line in found if line.startswith("    ")]


def test_what_is_overwritten_gets_a_new_buffer():
    assert rewritten(
        "extern_kernels.mm(buf0, buf1, out=buf2)",
        "del buf0",
        "buf3 = buf1; del buf1  # reuse",
        "update(buf2, buf4, buf3, 8, 0.5)",
    ) == [
        "extern_kernels.mm(buf0, buf1, out=buf2); buf1 = buf1.size(), buf1.stride(), buf1.dtype, buf1.device",
        "del buf0",
        "buf3 = _dtrrun_anew(*buf1); del buf1",
        "update(buf2, buf4, buf3, 8, 0.5)",
    ]


def test_a_new_buffer_may_have_another_shape():
    made = rewritten(
        "extern_kernels.mm(buf0, buf1, out=buf2)",
        "buf3 = reinterpret_tensor(buf1, (8, s0), (s0, 1), 0); del buf1  # reuse",
        "extern_kernels.addmm(buf2, buf0, buf4, alpha=1, out=buf3)",
    )
    assert made is not None
    assert made[0].endswith("buf1 = (8, s0), (s0, 1), buf1.dtype, buf1.device")


@pytest.mark.parametrize(
    "uses",
    [
        ["update(buf3, buf4, buf2, 8, 0.5)"],  # updated in place
        ["update(buf2, buf3, buf5, 8, 0.5)"],
        ["update(buf2, reinterpret_tensor(buf3, (1,), (1,), 0), buf3, 8, 0.5)"],
        ["extern_kernels.mm(buf3, buf2, out=buf3)"],
        ["aten.sort.default(buf3)"],
        ["return (buf3,)"],
        ["buf5 = buf3; del buf3  # reuse", "update(buf5, buf4, buf2, 8, 0.5)"],
        [],
    ],
)
def test_what_is_read_keeps_its_buffer(uses):
    assert (
        rewritten("extern_kernels.mm(buf0, buf1, out=buf2)", "buf3 = buf1; del buf1  # reuse", *uses) is None
    )


@pytest.mark.parametrize(
    "uses",
    [
        ["buf5 = reinterpret_tensor(buf3, (4, 8), (16, 1), 0)  # alias", "update(buf2, buf4, buf5, 8, 0.5)"],
        ["buf5 = buf3; del buf3  # reuse", "reduce(buf5, buf2)"],
    ],
)
def test_what_nothing_has_been_written_to_gets_a_new_buffer(uses):
    made = rewritten("extern_kernels.mm(buf0, buf1, out=buf2)", "buf3 = buf1; del buf1  # reuse", *uses)
    assert made is not None
    assert made[1] == "buf3 = _dtrrun_anew(*buf1); del buf1"


def test_what_is_updated_again_is_copied_first():
    """Otherwise a sum over the layers could only be recomputed from its first term."""
    made = rewritten(
        "buf1 = buf0; del buf0  # reuse",
        "update(buf1, buf9, buf8, 8, 0.5)",
        "buf2 = buf1; del buf1  # reuse",
        "update(buf2, buf9, buf7, 8, 0.5)",
    )
    assert made is not None
    assert made[0] == "buf1 = buf0; del buf0  # reuse"
    assert made[2] == "buf2 = _dtrrun_copy(buf1); del buf1  # reuse"
