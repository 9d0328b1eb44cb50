"""Handles operators, in C++. `interposer.cpp` says how they reach it, `extensions` compiles it."""
