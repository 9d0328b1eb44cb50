"""What the driver shows, queried through NVML in the launcher: devices and memory by process. No torch."""
