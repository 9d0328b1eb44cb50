"""Replacements in PyTorch and Python while a session runs; `registry` installs and removes them."""
