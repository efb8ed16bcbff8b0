"""The check that the text encoders of a model have the layers that a text skips, before any of them runs."""

from __future__ import annotations

from modelpool.pool.families.parts.text_reading import most_layers_skipped
from modelpool.pool.families.text_readings import readings_of
from modelpool.pool.models.loading.open_model import OpenModel
from modelpool.pool.models.text.encode import layer_count
from modelpool.pool.values.core.errors import counted, unusable_field
from modelpool.pool.values.core.stage_params import EncodeParams, encoders_run


def check_skipped_layers(opened: OpenModel, work: EncodeParams) -> None:
    """Raise UnusableField if `work` skips more layers than a text encoder of its model has."""
    if not work.layers_skipped:
        return
    family = opened.checkpoint.family
    readings = readings_of(family.text_set)
    most: list[int] = []
    for role in encoders_run(work, family.text_encoders, family.sampling):
        facts = family.texts[role] if readings is None else readings[opened.place(role)]
        own = most_layers_skipped(facts, layer_count(opened.component(role).built.module))
        most += [] if own is None else [own]
    if most and work.layers_skipped > min(most):
        found = counted(work.layers_skipped, "skipped layer")  # programs that number layers see this message, too
        expected = f"at most {min(most)}: text encoders of model {work.model.name!r} have no more layers"
        raise unusable_field("clip_skip", found, expected)
