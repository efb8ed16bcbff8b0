"""ControlNets: models that read a picture beside the noisy latent and tell a diffusion model what to make of it."""
