"""Python text for programs: a small training, and how one reports what its operators pass through."""

TRAINS = """
import sys, torch
weight = torch.nn.Parameter(torch.ones(1000))
optimizer = torch.optim.SGD([weight], 0.1)
for _ in range(2):
    weight.square().sum().backward()
    optimizer.step()
print("trained")
"""

MODES = """
def modes():
    import sys
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
    names = [type(mode).__name__ for mode in _get_current_dispatch_mode_stack()]
    native = sys.modules.get("_dtrrun_native")
    return ["dtrrun"] * bool(native and native.is_on()) + names
"""
"""With this a program reports whether its operators reach dtrrun, and which modes are active."""
