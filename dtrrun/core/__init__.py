"""Dynamic Tensor Rematerialization (paper, Sec. 2) over storages of any kind: plain Python, no torch."""
