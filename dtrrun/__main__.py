"""The command `dtrrun`, which `python -m dtrrun` runs as well."""

from __future__ import annotations

import signal


def main() -> None:
    """Run the command line of this process and exit."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is not signal.default_int_handler:  # ignored, say
        handler = None
    else:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # while we import, Ctrl-C ends us without a word
    from dtrrun.cli.main import main as run

    if handler is not None:
        signal.signal(signal.SIGINT, handler)
    run()


if __name__ == "__main__":
    main()
