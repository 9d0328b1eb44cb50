"""Python text that lets a program say under which dispatch modes it runs."""

MODES = """
def modes():
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
    return [type(mode).__name__ for mode in _get_current_dispatch_mode_stack()]
"""
