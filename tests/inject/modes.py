"""Python text with which a program reports whether its operators reach dtrrun, and which modes are active."""

MODES = """
def modes():
    import sys
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
    names = [type(mode).__name__ for mode in _get_current_dispatch_mode_stack()]
    native = sys.modules.get("_dtrrun_native")
    return ["dtrrun"] * bool(native and native.is_on()) + names
"""
