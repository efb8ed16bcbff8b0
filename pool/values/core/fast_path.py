"""`FastPath`: how the calls of a resident diffusion model are made, by model. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class FastPath:
    """Ways to call a diffusion model with resident weights, both off by default.

    compiles  its repeated blocks are compiled (`pool.weights.patcher.compiled_blocks`); never on the simulated device
    captures  its calls are captured as CUDA graphs (`pool.weights.patcher.graphed_calls`); only on CUDA
    """

    compiles: bool = False
    captures: bool = False

    def on(self, device_kind: str) -> FastPath:
        """Return what of it holds on a device of this kind."""
        return FastPath(self.compiles and device_kind != "sim", self.captures and device_kind == "cuda")

    @property
    def words(self) -> str:
        """It in words."""
        said = [("compiled blocks", self.compiles), ("CUDA graphs", self.captures)]
        return ", ".join(word for word, holds in said if holds) or "as usual"


@dataclass(frozen=True, slots=True)
class FastPaths:
    """The fast paths of models that have their own, by name, and of all others."""

    usual: FastPath = field(default_factory=FastPath)
    models: tuple[tuple[str, FastPath], ...] = ()

    def of(self, model: str) -> FastPath:
        """Return the fast path of the model with this name."""
        return next((path for name, path in self.models if name == model), self.usual)

    @property
    def any(self) -> FastPath:
        """Return what holds for any model."""
        every = [self.usual, *(path for _, path in self.models)]
        return FastPath(any(path.compiles for path in every), any(path.captures for path in every))
