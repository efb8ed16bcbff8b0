"""`save_diffusers`: saves a model with its patches as a folder that diffusers pipelines load.

`pool.models.saving.folder_parts` determines classes, configurations and tensors of its components;
`pool.models.saving.pipelines` the pipeline, scheduler and settings. A part that the checkpoint lacks, or nothing could
load, is not invented: the index marks it as missing, and the result lists it.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import DiffusionPipeline, guiders
from torch import nn
from transformers import PreTrainedModel

from modelpool.pool.families.parts.located_family import Architecture
from modelpool.pool.families.parts.pipeline_form import INDEX_FILE, NOTHING, PipelineFacts, SchedulerFacts
from modelpool.pool.families.parts.text_reading import Reading
from modelpool.pool.families.parts.two_stages import with_text_encoder
from modelpool.pool.families.transformer_families import TRANSFORMERS
from modelpool.pool.files.formats.atomic_write import atomic_folder, expect_free
from modelpool.pool.files.formats.folder_header import CLASS_KEY
from modelpool.pool.files.formats.shards import SHARD_BYTES, write_shards
from modelpool.pool.models.components.common.library_names import image_processor
from modelpool.pool.models.loading.build_checkpoint import Checkpoint
from modelpool.pool.models.loading.open_model import OpenModel
from modelpool.pool.models.loading.open_tokenizer import reading_of_role, tokenizer_of
from modelpool.pool.models.saving.checkpoint_file import Progress, Saved, counting, patched_model
from modelpool.pool.models.saving.clip_tokenizer_files import write_clip_tokenizer
from modelpool.pool.models.saving.folder_parts import FolderPart, MissingPart, normalizer_part, parts_of
from modelpool.pool.models.saving.glm_image_folder import PROCESSOR_CLASS, is_glm_image, write_writer_processor
from modelpool.pool.models.saving.left_out import left_out
from modelpool.pool.models.saving.llava_folder import is_llava
from modelpool.pool.models.saving.metadata import with_facts
from modelpool.pool.models.saving.pipelines import noisy_scheduler_facts, pipeline_facts, scheduler_facts
from modelpool.pool.models.saving.replaced_folder import expect_outside, lost_files
from modelpool.pool.models.saving.single_file import refuse_blocks
from modelpool.pool.models.saving.text_tokenizer_files import tokenizer_class, write_text_tokenizer
from modelpool.pool.models.saving.transformer_pipelines import pipeline_name, transformer_pipeline
from modelpool.pool.models.text.text_tokenizer import TOKENIZER_FACTS, TokenizerMissing, tokenizer_kind
from modelpool.pool.values.core.errors import OutputFailed
from modelpool.pool.values.core.stage_params import LoraRef
from modelpool.pool.values.specs.spec import Role
from modelpool.pool.weights.patches.patch_set import PatchSet

#: the file names that diffusers and transformers expect
_WEIGHTS, _TEXT_WEIGHTS = "diffusion_pytorch_model", "model"
_CLIP_TOKENIZER = "CLIPTokenizer"
#: index settings about parts that are not saved
_SETTINGS_OF_UNSAVED = ("requires_safety_checker",)


@dataclass(frozen=True, slots=True)
class _Tokenizer:
    """The folder of a tokenizer: its class, and a function that writes it."""

    folder: str
    class_name: str
    write: Callable[[Path], None]


def save_diffusers(
    model: OpenModel | Checkpoint,
    path: Path,
    *,
    loras: Sequence[LoraRef] = (),
    patches: Mapping[Role, PatchSet] | None = None,
    dtype: torch.dtype | None = None,
    metadata: Mapping[str, str] | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Saved:
    """Write `model` to the folder `path` as a diffusers pipeline, with `loras` merged and then `patches`, in order.

    Weights are computed as in `pool.models.saving.checkpoint_file.save_checkpoint`, in the dtypes of the file, or in
    `dtype`; quantized ones become plain. A component's are in one file, or in several of about `shard_bytes`.
    The folder is written atomically. With `overwrite`, a folder that contains a pipeline and nothing else is replaced
    (`pool.models.saving.replaced_folder`), another is not. `Saved.missing` lists what its pipeline reads and the folder
    lacks, `Saved.left_out` the tensors of the checkpoint that no component takes. Raises as `save_checkpoint` does,
    FilesWouldBeLost for files that would be lost, and UnknownArchitecture for a family without a pipeline.
    """
    expect_free(path, overwrite)
    found = patched_model(model, loras, patches)
    if found.checkpoint.header.configs:
        expect_outside(path, Path(found.checkpoint.header.path))
    refuse_blocks(found.checkpoint, dtype)
    # the pipelines of diffusers have no encoder of images of stage C
    family = found.checkpoint.family.without_encoder()
    checkpoint = replace(found.checkpoint, family=with_text_encoder(family, found.checkpoint.shapes))
    facts, schedulers = pipeline_facts(checkpoint.family), {"scheduler": scheduler_facts(checkpoint.family)}
    if facts.noisy:
        schedulers[facts.noisy] = noisy_scheduler_facts(checkpoint.family)
    each = [
        part for role in checkpoint.family.prefixes for part in parts_of(checkpoint, role, facts, found.patches, dtype)
    ]
    parts = [part for part in each if isinstance(part, FolderPart)]
    normalizer = normalizer_part(checkpoint)
    parts += [] if normalizer is None else [normalizer]
    read = list(_tokenizers(checkpoint, facts, parts))
    tokenizers = [one for one in read if isinstance(one, _Tokenizer)]
    missing = [MissingPart(folder, why) for folder, why in facts.missing.items()]
    missing_parts = [
        one
        for one in (*_missing_parts(checkpoint, facts, parts), *each, *read, *missing)
        if isinstance(one, MissingPart)
    ]
    left = left_out(checkpoint, [role for role in checkpoint.roles if _is_missing(facts, missing_parts, role)])
    file_metadata = with_facts({"format": "pt"}, found.source, found.merged, dtype is not None, metadata)
    on_bytes = counting([tensor for part in parts for tensor in part.tensors], progress)
    with atomic_folder(path, lost_files, overwrite=overwrite) as folder:
        for part in parts:
            try:
                _write_part(folder / part.folder, part, file_metadata, shard_bytes, on_bytes)
            except OutputFailed as error:  # names the temporary folder
                raise OutputFailed(str(error).replace(str(folder), str(path))) from error
        for tokenizer in tokenizers:
            tokenizer.write(folder / tokenizer.folder)
        _write_settings(folder, facts, schedulers, _vision_part(parts))
        index = _index(checkpoint, facts, parts, tokenizers, missing_parts, {**schedulers, **facts.guiders})
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        file_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    tensors = sum(len(part.tensors) for part in parts)
    return Saved(path, file_bytes, tensors, found.patched, tuple(str(lack) for lack in missing_parts), left)


def _is_missing(facts: PipelineFacts, missing_parts: Sequence[MissingPart], role: Role) -> bool:
    """Whether the component `role` is one of the missing parts."""
    return any(lack.folder == facts.folders.get(role) for lack in missing_parts)


def _missing_parts(checkpoint: Checkpoint, facts: PipelineFacts, parts: Sequence[FolderPart]) -> Iterator[MissingPart]:
    """Yield the components that the pipeline of a transformer family reads and `checkpoint` lacks, and the tokenizers
    of text encoders that are not among `parts`."""
    complete = TRANSFORMERS.get(checkpoint.family.name)
    if complete is None or transformer_pipeline(checkpoint.family) is None:
        return
    others = {Role.VAE: f"VAE with latents of {complete.latent_format}", Role.VISION_ENCODER: "vision encoder"}
    for role, folder in facts.folders.items():
        text = complete.texts.get(role)
        if role not in checkpoint.family.prefixes:
            what = others.get(role, "diffusion model") if text is None else text.encoder
            yield MissingPart(folder, f"the checkpoint has no {what}")
        is_connector = complete.architectures.get(role) is Architecture.TEXT_CONNECTOR
        if text is not None and not is_connector and all(part.role is not role for part in parts):
            yield MissingPart(facts.tokenizer_folder(role), f"there is no {folder} that uses it")


def _tokenizers(
    checkpoint: Checkpoint, facts: PipelineFacts, parts: Sequence[FolderPart]
) -> Iterator[_Tokenizer | MissingPart]:
    """Yield the tokenizer of each text encoder among `parts`, or in the diffusion model."""
    readers = [(part.role, part.module) for part in parts if part.role in checkpoint.family.texts]
    readers += [(role, checkpoint.build(role).module) for role in checkpoint.family.inside]
    for role, module in readers:
        folder, reading = facts.tokenizer_folder(role), reading_of_role(checkpoint, role)
        if reading is not None and reading.connects:
            continue
        if reading is None or reading.is_clip:
            pad_id = checkpoint.family.texts[role].pad_id if reading is None else reading.clip_pad_id
            yield _Tokenizer(folder, _CLIP_TOKENIZER, partial(write_clip_tokenizer, pad_id=pad_id))
            continue
        try:
            tokenizer = tokenizer_of(checkpoint, role, reading, module)
        except TokenizerMissing:
            yield _without_tokenizer(folder, module, reading)
            continue
        if reading.writes_tokens:
            yield _Tokenizer(folder, PROCESSOR_CLASS, partial(write_writer_processor, tokenizer=tokenizer))
        else:
            yield _Tokenizer(
                folder, tokenizer_class(tokenizer), partial(write_text_tokenizer, tokenizer=tokenizer, reading=reading)
            )


def _without_tokenizer(folder: str, module: nn.Module, reading: Reading) -> MissingPart:
    config: Any = module.config  # transformers is not typed
    vocabulary = getattr(config, "text_config", config).vocab_size
    facts = TOKENIZER_FACTS[tokenizer_kind(reading.encoder, vocabulary, config.model_type)]
    return MissingPart(
        folder, f"no tokenizer of {facts.title} is in the file or next to it, expected {facts.published}"
    )


def _write_part(
    folder: Path,
    part: FolderPart,
    metadata: Mapping[str, str],
    shard_bytes: int,
    on_bytes: Callable[[int], None] | None,
) -> None:
    """Write the configuration and the weights of a component."""
    _write_config(folder, part)
    stem = _TEXT_WEIGHTS if isinstance(part.module, PreTrainedModel) else _WEIGHTS
    write_shards(folder, stem, part.tensors, metadata, shard_bytes=shard_bytes, on_bytes=on_bytes)


def _write_config(folder: Path, part: FolderPart) -> None:
    """Write the configuration of a component."""
    folder.mkdir()
    module: Any = part.module
    if part.config is not None:
        (folder / "config.json").write_text(json.dumps(part.config, indent=2) + "\n", encoding="utf-8")
    elif isinstance(module, PreTrainedModel):
        module.config.architectures = [type(module).__name__]
        module.config.dtype = part.dtype
        module.config.save_pretrained(folder)
        if is_glm_image(module):
            module.generation_config.save_pretrained(folder)
    else:
        module.save_config(folder)


def _write_settings(
    folder: Path, facts: PipelineFacts, schedulers: Mapping[str, SchedulerFacts], vision_part: FolderPart | None
) -> None:
    """Write the parts without weights: the image processor of `vision_part`, schedulers, guiders."""
    if facts.processor and vision_part is not None:
        _write_processor(folder / facts.processor, vision_part)
    for place, scheduler in schedulers.items():
        _write_scheduler(folder / place, scheduler)
    for place, guider in facts.guiders.items():
        getattr(guiders, guider.name)(**guider.settings).save_pretrained(folder / place)


def _write_scheduler(folder: Path, facts: SchedulerFacts) -> None:
    """Write the configuration of a scheduler; of one that needs a missing library, its known settings."""
    kind = getattr(diffusers, facts.name)
    if not hasattr(kind, "_backends"):
        kind(**facts.settings).save_config(folder)
        return
    folder.mkdir()
    config = {"_class_name": facts.name, "_diffusers_version": diffusers.__version__, **facts.settings}
    (folder / "scheduler_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _vision_part(parts: Sequence[FolderPart]) -> FolderPart | None:
    """Return the vision encoder, or the text encoder that contains it, if there is one."""
    return next((one for one in parts if one.role is Role.VISION_ENCODER or is_llava(one.module)), None)


def _write_processor(folder: Path, part: FolderPart) -> None:
    """Write the settings that convert images to the input of the vision encoder."""
    config: Any = part.module.config
    side = getattr(config, "vision_config", config).image_size
    image_processor("CLIPImageProcessor")(
        size={"shortest_edge": side}, crop_size={"height": side, "width": side}
    ).save_pretrained(folder)


def _index(
    checkpoint: Checkpoint,
    facts: PipelineFacts,
    parts: Sequence[FolderPart],
    tokenizers: Sequence[_Tokenizer],
    missing_parts: Sequence[MissingPart],
    without_weights: Mapping[str, SchedulerFacts],
) -> dict[str, Any]:
    classes = {
        p.folder: (
            "transformers" if isinstance(p.module, PreTrainedModel) else facts.libraries.get(p.folder, "diffusers"),
            type(p.module).__name__,
        )
        for p in parts
    }
    if facts.processor and _vision_part(parts):
        classes[facts.processor] = ("transformers", "CLIPImageProcessor")
    index = checkpoint.header.configs.get(INDEX_FILE, {})
    return {
        "_class_name": _class_name(facts, parts, index.get(CLASS_KEY)),
        "_diffusers_version": diffusers.__version__,
        **facts.entries,
        **_kept_settings(facts, index),
        **{lack.folder: NOTHING for lack in missing_parts},
        **classes,
        **{one.folder: ("transformers", one.class_name) for one in tokenizers},
        **{place: ("diffusers", settings.name) for place, settings in without_weights.items()},
    }


def _class_name(facts: PipelineFacts, parts: Sequence[FolderPart], original: object) -> str:
    """Return the class of the pipeline. A folder keeps the class that it `original` if that takes the same components:
    an editing pipeline (FluxKontextPipeline) has the model of a text-to-image one, and no tensor distinguishes them."""
    model = next((part.config for part in parts if part.role is Role.DIFFUSION_MODEL), None)
    name = pipeline_name(facts, model or {})
    if original in (name, None) or name != facts.name:  # otherwise no pipeline of diffusers needs to be imported
        return name
    other = getattr(diffusers, original, None) if isinstance(original, str) else None
    if not (isinstance(other, type) and issubclass(other, DiffusionPipeline)):
        return name
    ours, theirs = (inspect.signature(kind).parameters.keys() for kind in (getattr(diffusers, name), other))
    return other.__name__ if ours == theirs else name


def _kept_settings(facts: PipelineFacts, index: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in a folder's index that no tensor determines; not for parts that are left out."""
    return {
        key: index[key]
        for key, value in facts.entries.items()
        if isinstance(value, (bool, int, float))
        and type(index.get(key)) is type(value)
        and key not in _SETTINGS_OF_UNSAVED
    }
