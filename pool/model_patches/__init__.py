"""How a run's options act on diffusers modules: nothing is installed without options, nothing is left after the run."""
