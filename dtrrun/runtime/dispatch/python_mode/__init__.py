"""Compensates for changes in PyTorch's behaviour under a Python dispatch mode."""
