"""`dtrrun smoke`: runs a program with and without a budget, and compares the results."""
