"""`python -m dtrrun` is the command `dtrrun`."""

from dtrrun.cli.main import main

main()
