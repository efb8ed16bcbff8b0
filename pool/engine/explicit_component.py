"""`ExplicitComponent`: one component with weights that the user moves.

Part of `pool.engine.explicit_control`. Counts bytes of weights as on the device; complete modules move.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from modelpool.pool.engine.engine import Engine
from modelpool.pool.values.core.argument_checks import real_number, size_in_bytes
from modelpool.pool.values.core.errors import AdapterMismatch, DoesNotFit, does_not_fit, format_bytes
from modelpool.pool.values.core.stage_params import LoraRef, ModelRef
from modelpool.pool.values.specs.spec import Role
from modelpool.pool.weights.patcher.model_patcher import ModelPatcher
from modelpool.pool.weights.patches.patch_set import PatchSet, WeightPatch


class ExplicitComponent:
    """The text encoder, diffusion model or VAE of a loaded checkpoint. Moves only on request.

    patcher  the clone that runs use: added patches and options apply from the next run on

    Every method and property raises ModelClosed if the model is closed.
    """

    def __init__(
        self,
        engine: Callable[[], Engine],
        model: ModelRef,
        role: Role,
        find_lora: Callable[[str | os.PathLike[str], float], LoraRef],
    ) -> None:
        """`engine` returns the engine of the model, or raises ModelClosed."""
        self._engine = engine
        self._model = model
        self._find_lora = find_lora
        self.role = role
        self._of_loras: tuple[WeightPatch, ...] = ()
        self.patcher: ModelPatcher = engine().patcher(model, role)
        self._size_bytes = self.patcher.spec().weight_bytes

    @property
    def size_bytes(self) -> int:
        """Bytes on the device when fully resident."""
        self._engine()
        return self._size_bytes

    @property
    def resident_bytes(self) -> int:
        """Bytes currently on the device."""
        self._engine()
        return self.patcher.resident().resident_bytes

    def to_gpu(self) -> int:
        """Load all of it to the device, with its current patches. Returns the bytes that arrived, 0 if it was fully
        resident.

        Evicts nothing: raises DoesNotFit if there is not enough room, and then moves nothing.
        """
        missing_bytes = self.size_bytes - self.resident_bytes
        if missing_bytes == 0 and self.patcher.resident().patch_digest == self.patcher.use().patch_digest:
            return 0
        if missing_bytes > self._room_bytes():
            raise self._no_room(missing_bytes)
        return self._load(self.size_bytes)

    def to_cpu(self) -> int:
        """Unload it from the device. Returns the bytes that left, 0 if nothing was resident."""
        return self._engine().vram.unload(self.patcher.key)

    def partially_load(self, size_bytes: int | str) -> int:
        """Load at most `size_bytes` (or a text, "1GiB") more to the device: complete modules, as far as there is room.
        Returns the bytes that arrived; evicts nothing. Raises UnusableField for an invalid size."""
        asked_bytes = size_in_bytes("partially_load(size_bytes)", size_bytes)
        most_bytes = min(asked_bytes, self.size_bytes - self.resident_bytes, self._room_bytes())
        return self._load(self.resident_bytes + most_bytes) if most_bytes > 0 else 0

    def partially_unload(self, size_bytes: int | str) -> int:
        """Unload at least `size_bytes` (or a text, "1GiB"), or all that is resident: complete modules. Returns the
        bytes that left. Raises UnusableField for an invalid size."""
        asked_bytes, vram = size_in_bytes("partially_unload(size_bytes)", size_bytes), self._engine().vram
        return vram.unload(self.patcher.key, asked_bytes) if asked_bytes else 0

    def add_lora(self, path: str | os.PathLike[str], strength: float = 1.0) -> int:
        """Add a LoRA file after the existing ones, from the next run on. Returns the number of parameters that it
        changes.

        Resident weights are patched by the next `to_gpu` or run. Raises UnusableField for a path without a file,
        CorruptFile, and AdapterMismatch for a file of another architecture or without keys for this component.
        """
        engine = self._engine()
        lora = self._find_lora(path, real_number("strength", strength, "a finite number"))
        patches = engine.patcher(self._model, self.role, (lora,)).patches.patches
        if not patches:
            raise AdapterMismatch(f"LoRA {lora.name!r}: found nothing for the {self.role.value}, expected some keys")
        self._of_loras += patches
        return len(self.patcher.add_patches(patches))

    def remove_loras(self) -> None:
        """Remove all LoRAs added by `add_lora`, from the next run on."""
        self._engine()
        added = {id(patch) for patch in self._of_loras}
        self.patcher.patches = PatchSet(tuple(p for p in self.patcher.patches.patches if id(p) not in added))
        self._of_loras = ()

    def _room_bytes(self) -> int:
        """Bytes of weights that could be loaded next to all resident weights."""
        vram = self._engine().vram
        return vram.activation_room([self.patcher.use()], vram.residency().used_bytes)

    def _load(self, most_bytes: int) -> int:
        return self._engine().vram.load(self.patcher, most_bytes)

    def _no_room(self, missing_bytes: int) -> DoesNotFit:
        """Error for `to_gpu`: `missing_bytes` do not fit, or new patches if nothing is missing; with suggestions."""
        vram, scratch_bytes = self._engine().vram, self.patcher.use().scratch_bytes
        arrives = "to load" if missing_bytes else "to patch"
        has_others = vram.residency().used_bytes > self.resident_bytes
        helps = ["unload another component with to_cpu()"] if has_others else ["give it more device memory (vram)"]
        helps.append(
            "load a part with partially_load(bytes)" if missing_bytes else "unload a part with partially_unload(bytes)"
        )
        return does_not_fit(
            f"{self.patcher.key} on the device",
            missing_bytes + scratch_bytes,
            vram.room_bytes,
            f"currently free; {format_bytes(scratch_bytes)} of the need are for its largest layer {arrives}; "
            + ", or ".join(helps),
        )
