"""A process whose GPU is absent: the program runs, and what it would have on the GPU is counted.

For `dtrrun estimate`. Tensors on the GPU have a shape but no memory, and nothing is computed with them; those
on the CPU are as always.
"""
