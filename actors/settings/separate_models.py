"""Models made of separate files, as a pool's configuration names them. Torch-free, ray-free.

Knows the tables [models.NAME] and paths. What is in the files is `pool.loading.assembled_checkpoint`'s business.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from pydantic import field_validator

from modelpool.actors.request.strict import Strict
from modelpool.pool.core.assembly import Assembly
from modelpool.pool.core.errors import UserError, unknown_name, unusable_field


class SeparateModel(Strict):
    """[models.NAME]: a model made of separate files.

    checkpoint       a whole checkpoint, whose components are used where no other file takes their place
    diffusion_model  the file of the diffusion model; may be left out beside `checkpoint`
    vae              the file of the VAE
    text_encoders    the files of the text encoders; which each of them is, it says itself
    vision_encoder   the file of the vision encoder, for models that see an image
    low_noise        the file of a second diffusion model, which makes the steps of low noise, for models that are two
    """

    name: str
    checkpoint: Path | None = None
    diffusion_model: Path | None = None
    vae: Path | None = None
    text_encoders: tuple[Path, ...] = ()
    vision_encoder: Path | None = None
    low_noise: Path | None = None

    @field_validator("name")
    @classmethod
    def _name(cls, value: str) -> str:
        if not re.fullmatch(r"\w[\w .+()-]*", value) or value != value.strip():
            raise unusable_field("name", value, "letters, digits, spaces and any of _ . + - ( )")
        return value

    @property
    def assembly(self) -> Assembly:
        """As the catalog knows it. Raises CorruptFile where it names no diffusion model, or far too many files."""
        files = (self.checkpoint, self.diffusion_model, self.vae, self.vision_encoder, self.low_noise)
        checkpoint, diffusion_model, vae, seeing, low = ("" if file is None else str(file) for file in files)
        encoders, path = tuple(map(str, self.text_encoders)), str(Path(os.sep, "[models]", self.name))
        return Assembly(path, checkpoint, diffusion_model, vae, encoders, seeing, low)

    def describe(self) -> list[str]:
        """Its table, line by line."""
        said: dict[str, Any] = self.model_dump(exclude={"name"})
        shown = {key: json.dumps(value, default=str) for key, value in said.items() if value}
        return [f"[models.{json.dumps(self.name)}]", *(f"{key} = {text}" for key, text in shown.items()), ""]


def separate_models(table: Mapping[str, Any], folder: Path, reserved: Collection[str]) -> tuple[SeparateModel, ...]:
    """The models of the tables among the keys of [models]; paths in them are relative to `folder`. Names of models are
    none of the `reserved` keys. Raises UserError naming the table and the key."""
    models = []
    for name, keys in table.items():
        if name == "separate":
            raise unusable_field("separate", keys, "no such key here; write tables [models.NAME]")
        if not isinstance(keys, dict):
            continue
        if name in reserved:
            raise unusable_field(name, keys, "no table: it is a key of [models], and no name for a model")
        try:
            models.append(_model(name, keys, folder))
        except UserError as problem:
            raise type(problem)(f"{name}: {problem}") from None
    return tuple(models)


def _model(name: str, keys: Mapping[str, Any], folder: Path) -> SeparateModel:
    known = [key for key in SeparateModel.model_fields if key != "name"]
    for key in keys:
        if key not in known:
            raise unknown_name("key", key, known)
    model = SeparateModel(name=name, **{key: _absolute(value, folder) for key, value in keys.items()})
    _ = model.assembly  # says what is wrong with it
    return model


def _absolute(value: Any, folder: Path) -> Any:
    """Paths made absolute; what is none is left for the class to refuse."""
    if isinstance(value, list):
        return tuple(_absolute(each, folder) for each in value)
    return Path(os.path.normpath(folder / Path(value).expanduser())) if isinstance(value, str) else value
