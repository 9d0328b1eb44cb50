"""The fast path of operators in C++, from a wheel or built where it is used.

`build` finds or compiles it, and imports it. `interposer.cpp` says how operators reach it.
"""
