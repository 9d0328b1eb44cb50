"""Dynamic Tensor Rematerialization (paper, Sec. 2) over storages of any kind, without torch."""
