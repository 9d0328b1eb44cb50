"""The fast path of operators in C++, built where it is used.

`build` compiles it and keeps the result. `interposer.cpp` says how operators reach it.
"""
