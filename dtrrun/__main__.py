"""The command `dtrrun`; `python -m dtrrun` runs it too."""

from __future__ import annotations

import signal


def main() -> None:
    """Run the command line of this process and exit."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is not signal.default_int_handler:  # for example, ignored
        handler = None
    else:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # during imports, Ctrl-C ends us silently
    from dtrrun.cli.main import main as run

    if handler is not None:
        signal.signal(signal.SIGINT, handler)
    run()


if __name__ == "__main__":
    main()
