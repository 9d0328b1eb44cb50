"""`python -m dtrrun` runs the command `dtrrun`."""

from dtrrun.cli.main import main

main()
