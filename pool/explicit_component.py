"""`ExplicitComponent`: one component whose weights a person moves by hand.

Part of `pool.explicit_control`. Counts in bytes of weights as they are on the device; whole modules move.
"""

from __future__ import annotations

from collections.abc import Callable

from pool.engine import Engine
from pool.errors import AdapterMismatch, does_not_fit, unusable_field
from pool.patcher import ModelPatcher
from pool.patches.patch_set import PatchSet, WeightPatch
from pool.spec import Role
from pool.work import LoraRef, ModelRef


class ExplicitComponent:
    """The text encoder, diffusion model or VAE of a loaded checkpoint. Moves when asked to, never by itself.

    patcher  the clone that runs use: patches and options that are added to it act from the next run on
    """

    def __init__(self, engine: Engine, model: ModelRef, role: Role, find_lora: Callable[[str, float], LoraRef]) -> None:
        self._engine = engine
        self._model = model
        self._find_lora = find_lora
        self.role = role
        self._of_loras: tuple[WeightPatch, ...] = ()
        self.patcher: ModelPatcher = engine.patcher(model, role)
        self._size_bytes = self.patcher.spec().weight_bytes

    @property
    def size_bytes(self) -> int:
        """Bytes on the device when all of it is there."""
        return self._size_bytes

    @property
    def resident_bytes(self) -> int:
        """Bytes that are on the device now."""
        return self.patcher.resident().resident_bytes

    def to_gpu(self) -> int:
        """Bring all of it to the device. Returns the bytes that arrived, 0 when all was there.

        Makes no room: raises DoesNotFit when it does not fit beside what is there, and moves nothing then.
        """
        missing_bytes = self.size_bytes - self.resident_bytes
        room_bytes = self._room_bytes()
        if missing_bytes > room_bytes:
            raise does_not_fit(
                f"{self.patcher.key} on the device",
                missing_bytes,
                max(0, room_bytes),
                "free now beside what its largest layer needs to arrive; take another component off with to_cpu(), or "
                "bring a part with partially_load(bytes)",
            )
        return self._load(self.size_bytes)

    def to_cpu(self) -> int:
        """Take all of it off the device. Returns the bytes that left, 0 when nothing was there."""
        return self._engine.vram.unload(self.patcher.key)

    def partially_load(self, size_bytes: int) -> int:
        """Bring at most `size_bytes` more to the device: whole modules, and no more than there is room for. Returns the
        bytes that arrived. Raises UnusableField for a number below 0."""
        most_bytes = min(_not_negative("partially_load", size_bytes), max(0, self._room_bytes()))
        return self._load(self.resident_bytes + most_bytes)

    def partially_unload(self, size_bytes: int) -> int:
        """Take at least `size_bytes` off the device, or all that is there: whole modules. Returns the bytes that left.
        Raises UnusableField for a number below 0."""
        if _not_negative("partially_unload", size_bytes) == 0:
            return 0
        return self._engine.vram.unload(self.patcher.key, size_bytes)

    def add_lora(self, path: str, strength: float = 1.0) -> int:
        """Add a LoRA file, after those that are there, from the next run on. Returns the parameters it changes here.

        What is resident is patched by the next `to_gpu` or run. Raises CorruptFile, and AdapterMismatch for a file of
        another architecture or without anything for this component.
        """
        lora = self._find_lora(path, strength)
        patches = self._engine.patcher(self._model, self.role, (lora,)).patches.patches
        if not patches:
            raise AdapterMismatch(f"LoRA {lora.name!r}: found nothing for the {self.role.value}, expected some keys")
        self._of_loras += patches
        return len(self.patcher.add_patches(patches))

    def remove_loras(self) -> None:
        """Take off all LoRAs that `add_lora` added, from the next run on."""
        added = {id(patch) for patch in self._of_loras}
        self.patcher.patches = PatchSet(tuple(p for p in self.patcher.patches.patches if id(p) not in added))
        self._of_loras = ()

    def _room_bytes(self) -> int:
        """Bytes of weights that could arrive beside all that is resident."""
        vram = self._engine.vram
        return vram.activation_room([self.patcher.use()], vram.residency().used_bytes)

    def _load(self, most_bytes: int) -> int:
        return self._engine.vram.load(self.patcher, most_bytes)


def _not_negative(method: str, size_bytes: int) -> int:
    if size_bytes < 0:
        raise unusable_field(f"{method}(size_bytes)", size_bytes, "a number of bytes, 0 or more")
    return size_bytes
