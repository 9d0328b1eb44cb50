"""The base classes of the parts. Each extension has its own, in C++ (`bindings/parts.h`): see `core.dtr`.

`bound.pyi` says what they have.
"""

Ledger = Recipes = Deallocation = Eviction = Rematerializer = Mutation = Operators = object
