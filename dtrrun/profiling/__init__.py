"""What `dtrrun profile` does: short runs of a program, predictions between them, and what follows."""
