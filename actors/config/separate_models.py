"""Models of separate files in a pool's configuration: the tables [models.NAME]. Torch-free, ray-free.

`pool.models.loading.assembled_checkpoint` reads the files themselves.
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
from modelpool.pool.values.core.assembly import Assembly
from modelpool.pool.values.core.errors import UserError, unknown_name, unusable_field


class SeparateModel(Strict):
    """[models.NAME]: a model of separate files.

    checkpoint       a complete checkpoint; its components are used unless another file replaces them
    diffusion_model  the diffusion model; optional with `checkpoint`
    vae              the VAE
    text_encoders    the text encoders, in any order; they are identified by their content
    vision_encoder   the vision encoder, for models with an image input
    low_noise        the low-noise expert, for models with two experts
    unconditional    the model that predicts without a text, for models that are guided by one
    """

    name: str
    checkpoint: Path | None = None
    diffusion_model: Path | None = None
    vae: Path | None = None
    text_encoders: tuple[Path, ...] = ()
    vision_encoder: Path | None = None
    low_noise: Path | None = None
    unconditional: Path | None = None

    @field_validator("name")
    @classmethod
    def _name(cls, value: str) -> str:
        if not re.fullmatch(r"\w[\w .+()-]*", value) or value != value.strip():
            raise unusable_field("name", value, "letters, digits, spaces and any of _ . + - ( )")
        return value

    @property
    def assembly(self) -> Assembly:
        """The catalog's form. Raises CorruptFile if it names no diffusion model, or far too many files."""
        second = (self.vision_encoder, self.low_noise, self.unconditional)
        files = (self.checkpoint, self.diffusion_model, self.vae, *second)
        checkpoint, diffusion_model, vae, *more = ("" if file is None else str(file) for file in files)
        encoders, path = tuple(map(str, self.text_encoders)), str(Path(os.sep, "[models]", self.name))
        return Assembly(path, checkpoint, diffusion_model, vae, encoders, *more)

    def describe(self) -> list[str]:
        """Format its table as lines."""
        fields: dict[str, Any] = self.model_dump(exclude={"name"})
        lines = {key: json.dumps(value, default=str) for key, value in fields.items() if value}
        return [f"[models.{json.dumps(self.name)}]", *(f"{key} = {text}" for key, text in lines.items()), ""]


def separate_models(table: Mapping[str, Any], folder: Path, reserved: Collection[str]) -> tuple[SeparateModel, ...]:
    """Parse the tables among the keys of [models]; paths are relative to `folder`, and names of models may not be
    `reserved` keys. Raises UserError naming the table and the key.
    """
    models = []
    for name, keys in table.items():
        if name == "separate":
            raise unusable_field("separate", keys, "no such key here; write tables [models.NAME]")
        if not isinstance(keys, dict):
            continue
        if name in reserved:
            raise unusable_field(name, keys, "no table: it is a key of [models] and cannot name a model")
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
    _ = model.assembly  # reports its errors
    return model


def _absolute(value: Any, folder: Path) -> Any:
    """Make paths absolute; other values are left for the class to refuse."""
    if isinstance(value, list):
        return tuple(_absolute(each, folder) for each in value)
    return Path(os.path.normpath(folder / Path(value).expanduser())) if isinstance(value, str) else value
