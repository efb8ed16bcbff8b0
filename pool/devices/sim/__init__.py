"""The simulated accelerator: torch.device("sim:0") with a memory budget."""
