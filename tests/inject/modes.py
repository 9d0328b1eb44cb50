"""Python text that lets a program say whether its operators come to dtrrun, and under which modes it runs."""

MODES = """
def modes():
    import sys
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
    names = [type(mode).__name__ for mode in _get_current_dispatch_mode_stack()]
    extension = sys.modules.get("_dtrrun_native")
    ours = ["dtrrun"] * bool(extension and extension.is_on())
    return ours + ["dtrrun" if name == "DTRMode" else name for name in names]
"""
