"""Programs that call `torch.compile`: each kernel that it generates is an operator of the session."""
