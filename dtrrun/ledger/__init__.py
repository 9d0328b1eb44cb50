"""Storages by version, the recipes between them, and what is evicted and run again to keep a budget.

Plain Python without torch: the live runtime runs it over PyTorch's storages, the simulator over stand-ins
(`dtrrun.simulator.live`), so that both decide alike.
"""
