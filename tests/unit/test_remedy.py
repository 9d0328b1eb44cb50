"""What is said to a compiled program whose budget is too small."""

from dtrrun.runtime.compiled.remedy import IN_A_COMMAND, remedy

KERNEL = "inductor_kernel.cpp_fused_lerp"


def test_a_kernel_that_needs_all_of_its_state_at_once():
    """Where weights leave for the host, recomputing less would be of no use."""
    called = ("aten.mm", KERNEL)
    assert "8.43 MB" in remedy(called, IN_A_COMMAND, KERNEL, 8_430_000, 5_000_000)
    for refused, limit in (("aten.mm", 5_000_000), (KERNEL, 9_000_000), ("", 0)):
        text = remedy(called, IN_A_COMMAND, refused, 8_430_000, limit)
        assert "recomputes less" in text, refused
    assert remedy(("aten.mm",), IN_A_COMMAND, "aten.mm", 2, 1) == ""
