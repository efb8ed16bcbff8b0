"""Options of sampling runs: extensions of the guidance, changes inside the diffusion model, and caches over the steps."""
