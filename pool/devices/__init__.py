"""Devices: accelerators of every maker, the CPU, and a simulated accelerator with a real memory budget."""
