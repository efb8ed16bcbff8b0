"""Accelerators of every kind and the CPU: detection, memory accounts, transfers, pinned memory."""
