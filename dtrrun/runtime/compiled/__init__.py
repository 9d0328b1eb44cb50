"""Programs that call `torch.compile`: each kernel of what it generates is an operator of the session."""
