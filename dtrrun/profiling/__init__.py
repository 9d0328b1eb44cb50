"""The implementation of `dtrrun profile`: short runs of a program, predictions between them, and results."""
