"""Devices: CUDA GPUs, the CPU, and a simulated accelerator with a real memory budget."""
