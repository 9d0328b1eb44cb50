"""What `dtrrun smoke` does: a program plain and inside a budget, and whether both come to the same."""
