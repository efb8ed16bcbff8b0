"""`ExplicitComponent`: one component whose weights a person moves by hand.

Part of `pool.engine.explicit_control`. Counts in bytes of weights as they are on the device; whole modules move.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from modelpool.pool.core.arguments import real_number, size_in_bytes
from modelpool.pool.core.errors import AdapterMismatch, DoesNotFit, does_not_fit, format_bytes
from modelpool.pool.core.stage_params import LoraRef, ModelRef
from modelpool.pool.engine.engine import Engine
from modelpool.pool.patcher.model_patcher import ModelPatcher
from modelpool.pool.patches.patch_set import PatchSet, WeightPatch
from modelpool.pool.specs.spec import Role


class ExplicitComponent:
    """The text encoder, diffusion model or VAE of a loaded checkpoint. Moves when asked to, never by itself.

    patcher  the clone that runs use: patches and options that are added to it act from the next run on

    Every method and figure raises ModelClosed when the model is closed.
    """

    def __init__(
        self,
        engine: Callable[[], Engine],
        model: ModelRef,
        role: Role,
        find_lora: Callable[[str | os.PathLike[str], float], LoraRef],
    ) -> None:
        """`engine` gives the engine of the model, or raises ModelClosed."""
        self._engine = engine
        self._model = model
        self._find_lora = find_lora
        self.role = role
        self._of_loras: tuple[WeightPatch, ...] = ()
        self.patcher: ModelPatcher = engine().patcher(model, role)
        self._size_bytes = self.patcher.spec().weight_bytes

    @property
    def size_bytes(self) -> int:
        """Bytes on the device when all of it is there."""
        self._engine()
        return self._size_bytes

    @property
    def resident_bytes(self) -> int:
        """Bytes that are on the device now."""
        self._engine()
        return self.patcher.resident().resident_bytes

    def to_gpu(self) -> int:
        """Bring all of it to the device, with the patches it has now. Returns the bytes that arrived, 0 when all was
        there.

        Makes no room: raises DoesNotFit when it does not fit beside what is there, and moves nothing then.
        """
        missing_bytes = self.size_bytes - self.resident_bytes
        if missing_bytes == 0 and self.patcher.resident().patch_digest == self.patcher.use().patch_digest:
            return 0
        if missing_bytes > self._room_bytes():
            raise self._no_room(missing_bytes)
        return self._load(self.size_bytes)

    def to_cpu(self) -> int:
        """Take all of it off the device. Returns the bytes that left, 0 when nothing was there."""
        return self._engine().vram.unload(self.patcher.key)

    def partially_load(self, size_bytes: int | str) -> int:
        """Bring at most `size_bytes` (or a text, "1GiB") more to the device: whole modules, and no more than there is
        room for. Returns the bytes that arrived; nothing leaves. Raises UnusableField for what is no number of bytes.
        """
        asked_bytes = size_in_bytes("partially_load(size_bytes)", size_bytes)
        most_bytes = min(asked_bytes, self.size_bytes - self.resident_bytes, self._room_bytes())
        return self._load(self.resident_bytes + most_bytes) if most_bytes > 0 else 0

    def partially_unload(self, size_bytes: int | str) -> int:
        """Take at least `size_bytes` (or a text, "1GiB") off the device, or all that is there: whole modules. Returns
        the bytes that left. Raises UnusableField for what is no number of bytes."""
        asked_bytes, vram = size_in_bytes("partially_unload(size_bytes)", size_bytes), self._engine().vram
        return vram.unload(self.patcher.key, asked_bytes) if asked_bytes else 0

    def add_lora(self, path: str | os.PathLike[str], strength: float = 1.0) -> int:
        """Add a LoRA file, after those that are there, from the next run on. Returns the parameters it changes here.

        What is resident is patched by the next `to_gpu` or run. Raises UnusableField for a path without a file,
        CorruptFile, and AdapterMismatch for a file of another architecture or without anything for this component.
        """
        engine = self._engine()
        lora = self._find_lora(path, real_number("strength", strength, "a finite number"))
        patches = engine.patcher(self._model, self.role, (lora,)).patches.patches
        if not patches:
            raise AdapterMismatch(f"LoRA {lora.name!r}: found nothing for the {self.role.value}, expected some keys")
        self._of_loras += patches
        return len(self.patcher.add_patches(patches))

    def remove_loras(self) -> None:
        """Take off all LoRAs that `add_lora` added, from the next run on."""
        self._engine()
        added = {id(patch) for patch in self._of_loras}
        self.patcher.patches = PatchSet(tuple(p for p in self.patcher.patches.patches if id(p) not in added))
        self._of_loras = ()

    def _room_bytes(self) -> int:
        """Bytes of weights that could arrive beside all that is resident."""
        vram = self._engine().vram
        return vram.activation_room([self.patcher.use()], vram.residency().used_bytes)

    def _load(self, most_bytes: int) -> int:
        return self._engine().vram.load(self.patcher, most_bytes)

    def _no_room(self, missing_bytes: int) -> DoesNotFit:
        """Why `to_gpu` cannot bring `missing_bytes`, or new patches where none are missing, and what helps."""
        vram, scratch_bytes = self._engine().vram, self.patcher.use().scratch_bytes
        arrives = "to arrive" if missing_bytes else "to be patched"
        has_others = vram.residency().used_bytes > self.resident_bytes
        helps = ["take another component off with to_cpu()"] if has_others else ["give it more device memory (vram)"]
        helps.append(
            "bring a part with partially_load(bytes)"
            if missing_bytes
            else "leave a part off with partially_unload(bytes)"
        )
        return does_not_fit(
            f"{self.patcher.key} on the device",
            missing_bytes + scratch_bytes,
            vram.room_bytes,
            f"what is free now; of the need {format_bytes(scratch_bytes)} are for its largest layer {arrives}; "
            + ", or ".join(helps),
        )
