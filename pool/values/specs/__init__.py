"""Values that describe components, tasks and runs: names, sizes, residency. Torch-free, sent between processes."""
