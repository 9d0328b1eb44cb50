"""Finds the extensions in C++ in a wheel or in the cache, or compiles them (docs/design/native.md)."""
