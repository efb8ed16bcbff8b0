"""Options of sampling runs: extensions of the guidance, changes inside the model, caches over steps."""
