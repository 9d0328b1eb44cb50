"""The record of a training process: figures that it writes and the launcher, or `dtrrun top`, reads."""
