"""Python text that lets a program say whether its operators come to dtrrun, and under which modes it runs."""

MODES = """
def modes():
    from torch._C import _dispatch_key_parse, _dispatch_tls_local_include_set
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
    names = [type(mode).__name__ for mode in _get_current_dispatch_mode_stack()]
    native = _dispatch_tls_local_include_set().has(_dispatch_key_parse("Fake"))
    return ["dtrrun"] * native + ["dtrrun" if name == "DTRMode" else name for name in names]
"""
