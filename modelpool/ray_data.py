"""Ray Data: `generate` gives each row of a Dataset an output of a pool; `from_outputs` reads outputs as a Dataset."""

from modelpool.actors.client.ray_data import from_outputs, generate

__all__ = ["from_outputs", "generate"]
