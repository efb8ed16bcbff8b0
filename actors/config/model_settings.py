"""Settings of [pool] for one model: the tables [pool.models.NAME]. Torch-free, ray-free."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import field_validator

from modelpool.actors.request.strict import Strict
from modelpool.pool.values.core.errors import UserError, unusable_field


class ModelSettings(Strict):
    """The table [pool.models.NAME]; keys that are left out are as in [pool]. `name` is that in `modelpool models`."""

    name: str
    compile: Literal["off", "blocks"] | None = None
    cuda_graphs: bool | None = None

    @field_validator("cuda_graphs", mode="before")
    @classmethod
    def _truth_value(cls, value: Any) -> Any:
        """Accept only booleans: pydantic would also accept "on" and 1."""
        if value is not None and not isinstance(value, bool):
            raise unusable_field("cuda_graphs", value, "true or false")
        return value

    def describe(self) -> list[str]:
        """Format its table as lines."""
        fields: dict[str, Any] = self.model_dump(exclude={"name"}, exclude_none=True)
        lines = [f"{key} = {json.dumps(value)}" for key, value in fields.items()]
        return [f"[pool.models.{json.dumps(self.name)}]", *lines, ""]


def settings_of_models(tables: Any) -> tuple[ModelSettings, ...]:
    """Parse the tables [pool.models.NAME]; settings that are parsed already stay. Raises UserError."""
    if isinstance(tables, (list, tuple)) and all(isinstance(each, (ModelSettings, Mapping)) for each in tables):
        return tuple(each if isinstance(each, ModelSettings) else ModelSettings(**each) for each in tables)
    if not isinstance(tables, Mapping):
        raise unusable_field("models", tables, "tables such as [pool.models.sdxl]")
    found = []
    for name, keys in tables.items():
        if not isinstance(keys, Mapping):
            raise unusable_field(f"models.{name}", keys, f"a table, [pool.models.{name}]")
        if "name" in keys:
            raise unusable_field(f"models.{name}.name", keys["name"], "no such key: the name is that of the table")
        try:
            found.append(ModelSettings(name=name, **keys))
        except UserError as problem:
            raise type(problem)(f"models.{name}: {problem}") from None
    return tuple(found)
