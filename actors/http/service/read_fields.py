"""`ReadFields`: the fields of a request, as the metadata of an image or a workflow has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from modelpool.actors.request.requests import GenerateRequest
from modelpool.pool.values.core.errors import missing_value


@dataclass(frozen=True, slots=True)
class ReadFields:
    """Fields of a request, as metadata has them.

    model, model_hash  the name of the checkpoint, and the first digits of its hash; "" if unknown
    lora_hashes        first digits of the hashes of LoRAs, by name
    notes              what the metadata has and the request has not
    """

    fields: Mapping[str, Any]
    model: str = ""
    model_hash: str = ""
    lora_hashes: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def request(self, **changes: Any) -> GenerateRequest:
        """Return the request with these fields set or replaced. Without a start image, the denoising strength of one is
        left out. Raises UserError."""
        fields = {"model": self.model or self.model_hash, **self.fields, **changes}
        if "strength" in self.fields and "strength" not in changes and fields.get("image") is None:
            del fields["strength"]
        if not fields["model"]:
            raise missing_value("model", "the name of a model: the metadata names none")
        return GenerateRequest(**{name: value for name, value in fields.items() if value is not None})

    def named(self, is_known: Callable[[str, str], bool]) -> ReadFields:
        """Return the same with hashes instead of the names of models ("model") and LoRAs ("lora") that are not known.
        Files are renamed more often than they are changed."""
        model = self.model
        if self.model_hash and not (model and is_known("model", model)) and is_known("model", self.model_hash):
            model = self.model_hash
        loras = tuple(
            each.model_copy(update={"name": digits})
            if (digits := self.lora_hashes.get(each.name)) and not is_known("lora", each.name)
            else each
            for each in self.fields.get("loras", ())
        )
        found = {**self.fields, "loras": loras} if loras else self.fields
        return replace(self, model=model, fields=found)
