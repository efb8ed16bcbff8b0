"""ControlNets: models that read a picture beside the noisy latent and tell a UNet what to make of it."""
