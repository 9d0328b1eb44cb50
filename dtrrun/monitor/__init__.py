"""What the driver shows, asked of NVML in the launcher: devices, memory by process, the budget. No torch."""
