"""ModelPatcher and the weights that its clones share: patching, weight hooks, compute context."""
