"""The record of a training process: figures that it writes, and that the launcher or `dtrrun top` reads."""
