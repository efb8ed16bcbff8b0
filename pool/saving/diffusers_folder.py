"""`save_diffusers`: a model with its patches as a folder that pipelines of diffusers load.

Which classes, configurations and tensors its components are is `pool.saving.folder_parts`; which pipeline, scheduler
and settings, `pool.saving.pipelines`. What the checkpoint has not, or nothing could load, is not made up: the index
says that it is not there, and the result says what it is.
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
from transformers import CLIPImageProcessorPil, PreTrainedModel

from modelpool.pool.core.errors import OutputFailed
from modelpool.pool.core.stage_params import LoraRef
from modelpool.pool.families.cascade_families import with_text_encoder
from modelpool.pool.families.transformer_families import TRANSFORMERS
from modelpool.pool.formats.atomic_write import expect_free, whole_folder
from modelpool.pool.formats.folder_header import CLASS
from modelpool.pool.formats.shards import SHARD_BYTES, write_shards
from modelpool.pool.loading.build_checkpoint import Checkpoint
from modelpool.pool.loading.open_model import OpenModel
from modelpool.pool.loading.open_tokenizer import reading_of_role, tokenizer_of
from modelpool.pool.patches.patch_set import PatchSet
from modelpool.pool.saving.checkpoint_file import Progress, Saved, counting, patched_model
from modelpool.pool.saving.folder_parts import FolderPart, Lack, parts_of
from modelpool.pool.saving.left_out import left_out
from modelpool.pool.saving.llava_folder import is_llava
from modelpool.pool.saving.metadata import with_facts
from modelpool.pool.saving.pipeline_form import INDEX_FILE, NOTHING, PipelineFacts, SchedulerFacts
from modelpool.pool.saving.pipelines import noisy_scheduler_facts, pipeline_facts, scheduler_facts
from modelpool.pool.saving.replaced_folder import expect_outside, lost_files
from modelpool.pool.saving.single_file import refuse_blocks
from modelpool.pool.saving.text_tokenizer_files import tokenizer_class, write_text_tokenizer
from modelpool.pool.saving.tokenizer_files import write_clip_tokenizer
from modelpool.pool.saving.transformer_pipelines import pipeline_name, transformer_pipeline
from modelpool.pool.specs.spec import Role
from modelpool.pool.text.reading import Reading
from modelpool.pool.text.text_tokenizer import TOKENIZER_FACTS, TokenizerMissing, tokenizer_kind

#: the names that diffusers and transformers look for
_WEIGHTS, _TEXT_WEIGHTS = "diffusion_pytorch_model", "model"
_CLIP_TOKENIZER = "CLIPTokenizer"
#: what an index says of parts that are not written
_OF_LEFT_OUT = ("requires_safety_checker",)


@dataclass(frozen=True, slots=True)
class _Tokenizer:
    """A folder of a tokenizer: its class, and what writes it there."""

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
    """Write `model` to the folder `path` as a pipeline of diffusers, `loras` merged and then `patches`, in order.

    Weights are computed as `pool.saving.checkpoint_file.save_checkpoint` does, and have the types of the file, or
    `dtype`; quantized ones become plain. Those of a component are in one file, or in several of about `shard_bytes`.
    The folder is there whole or not at all. With `overwrite` a folder that holds a pipeline and nothing else is
    replaced (`pool.saving.replaced_folder`), another is not. `Saved.lacks` says what its pipeline reads and the folder
    has not, `Saved.left_out` what the checkpoint has that no component takes. Raises as `save_checkpoint` does,
    FilesWouldBeLost for files that would be lost, and UnknownArchitecture for a family without a pipeline.
    """
    expect_free(path, overwrite)
    found = patched_model(model, loras, patches)
    if found.checkpoint.header.configs:
        expect_outside(path, Path(found.checkpoint.header.path))
    refuse_blocks(found.checkpoint, dtype)
    family = found.checkpoint.family
    checkpoint = replace(found.checkpoint, family=with_text_encoder(family, found.checkpoint.shapes))
    facts, schedulers = pipeline_facts(checkpoint.family), {"scheduler": scheduler_facts(checkpoint.family)}
    if facts.noisy:
        schedulers[facts.noisy] = noisy_scheduler_facts(checkpoint.family)
    each = [
        part for role in checkpoint.family.prefixes for part in parts_of(checkpoint, role, facts, found.patches, dtype)
    ]
    parts = [part for part in each if isinstance(part, FolderPart)]
    read = list(_tokenizers(checkpoint, facts, parts))
    tokenizers = [one for one in read if isinstance(one, _Tokenizer)]
    missing = [Lack(folder, why) for folder, why in facts.missing.items()]
    lacks = [one for one in (*_absent(checkpoint, facts, parts), *each, *read, *missing) if isinstance(one, Lack)]
    left = left_out(checkpoint, [role for role in checkpoint.roles if _is_told(facts, lacks, role)])
    said = with_facts({"format": "pt"}, found.source, found.merged, dtype is not None, metadata)
    on_bytes = counting([tensor for part in parts for tensor in part.tensors], progress)
    with whole_folder(path, lost_files, overwrite=overwrite) as folder:
        for part in parts:
            try:
                _write_part(folder / part.folder, part, said, shard_bytes, on_bytes)
            except OutputFailed as error:  # of a folder that nobody will find
                raise OutputFailed(str(error).replace(str(folder), str(path))) from error
        for tokenizer in tokenizers:
            tokenizer.write(folder / tokenizer.folder)
        _write_settings(folder, facts, schedulers, _seeing(parts))
        index = _index(checkpoint, facts, parts, tokenizers, lacks, {**schedulers, **facts.guiders})
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        file_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    tensors = sum(len(part.tensors) for part in parts)
    return Saved(path, file_bytes, tensors, found.patched, tuple(str(lack) for lack in lacks), left)


def _is_told(facts: PipelineFacts, lacks: Sequence[Lack], role: Role) -> bool:
    """Whether `lacks` say that the component `role` is not written."""
    return any(lack.folder == facts.folders.get(role) for lack in lacks)


def _absent(checkpoint: Checkpoint, facts: PipelineFacts, parts: Sequence[FolderPart]) -> Iterator[Lack]:
    """The components that the pipeline of a family of transformers reads and `checkpoint` has not, and the tokenizers
    of text encoders that are not among `parts`."""
    whole = TRANSFORMERS.get(checkpoint.family.name)
    if whole is None or transformer_pipeline(checkpoint.family) is None:
        return
    others = {Role.VAE: f"VAE with latents of {whole.latent_format}", Role.VISION_ENCODER: "vision encoder"}
    for role, folder in facts.folders.items():
        text = whole.texts.get(role)
        if role not in checkpoint.family.prefixes:
            what = others.get(role, "diffusion model") if text is None else text.encoder
            yield Lack(folder, f"the checkpoint has no {what}")
        if text is not None and all(part.role is not role for part in parts):
            yield Lack(facts.tokenizer_folder(role), f"there is no {folder} that reads with it")


def _tokenizers(
    checkpoint: Checkpoint, facts: PipelineFacts, parts: Sequence[FolderPart]
) -> Iterator[_Tokenizer | Lack]:
    """The tokenizer of each text encoder among `parts`."""
    for part in parts:
        if part.role not in checkpoint.family.texts:
            continue
        folder, reading = facts.tokenizer_folder(part.role), reading_of_role(checkpoint, part.role)
        if reading is None or reading.is_clip:
            pad_id = checkpoint.family.texts[part.role].pad_id if reading is None else reading.clip_pad_id
            yield _Tokenizer(folder, _CLIP_TOKENIZER, partial(write_clip_tokenizer, pad_id=pad_id))
            continue
        try:
            own = tokenizer_of(checkpoint, part.role, reading, part.module)
        except TokenizerMissing:
            yield _without_tokenizer(folder, part, reading)
        else:
            yield _Tokenizer(
                folder, tokenizer_class(own), partial(write_text_tokenizer, tokenizer=own, reading=reading)
            )


def _without_tokenizer(folder: str, part: FolderPart, reading: Reading) -> Lack:
    config: Any = part.module.config  # transformers is not typed
    facts = TOKENIZER_FACTS[tokenizer_kind(reading.encoder, config.vocab_size, config.model_type)]
    return Lack(folder, f"no tokenizer of {facts.title} is in the file or beside it, expected {facts.published}")


def _write_part(
    folder: Path, part: FolderPart, said: Mapping[str, str], shard_bytes: int, on_bytes: Callable[[int], None] | None
) -> None:
    """The configuration and the weights of a component."""
    _write_config(folder, part)
    stem = _TEXT_WEIGHTS if isinstance(part.module, PreTrainedModel) else _WEIGHTS
    write_shards(folder, stem, part.tensors, said, shard_bytes=shard_bytes, on_bytes=on_bytes)


def _write_config(folder: Path, part: FolderPart) -> None:
    """The configuration of a component."""
    folder.mkdir()
    module: Any = part.module
    if part.config is not None:
        (folder / "config.json").write_text(json.dumps(part.config, indent=2) + "\n", encoding="utf-8")
    elif isinstance(module, PreTrainedModel):
        module.config.architectures = [type(module).__name__]
        module.config.dtype = part.dtype
        module.config.save_pretrained(folder)
    else:
        module.save_config(folder)


def _write_settings(
    folder: Path, facts: PipelineFacts, schedulers: Mapping[str, SchedulerFacts], seeing: FolderPart | None
) -> None:
    """What has no weights: how images are shown to the part that is `seeing`, schedulers, what guides."""
    if facts.processor and seeing is not None:
        _write_processor(folder / facts.processor, seeing)
    for place, own in schedulers.items():
        _write_scheduler(folder / place, own)
    for place, own in facts.guiders.items():
        getattr(guiders, own.name)(**own.settings).save_pretrained(folder / place)


def _write_scheduler(folder: Path, facts: SchedulerFacts) -> None:
    """The configuration of a scheduler; of one that needs a library which is not there, what is known of it."""
    kind = getattr(diffusers, facts.name)
    if not hasattr(kind, "_backends"):
        kind(**facts.settings).save_config(folder)
        return
    folder.mkdir()
    said = {"_class_name": facts.name, "_diffusers_version": diffusers.__version__, **facts.settings}
    (folder / "scheduler_config.json").write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")


def _seeing(parts: Sequence[FolderPart]) -> FolderPart | None:
    """The vision encoder, or the text encoder that it is a part of, where there is one."""
    return next((one for one in parts if one.role is Role.VISION_ENCODER or is_llava(one.module)), None)


def _write_processor(folder: Path, part: FolderPart) -> None:
    """How images are brought into the form that the vision encoder is shown."""
    config: Any = part.module.config
    side = getattr(config, "vision_config", config).image_size
    CLIPImageProcessorPil(size={"shortest_edge": side}, crop_size={"height": side, "width": side}).save_pretrained(
        folder
    )


def _index(
    checkpoint: Checkpoint,
    facts: PipelineFacts,
    parts: Sequence[FolderPart],
    tokenizers: Sequence[_Tokenizer],
    lacks: Sequence[Lack],
    without_weights: Mapping[str, SchedulerFacts],
) -> dict[str, Any]:
    classes = {
        p.folder: (
            "transformers" if isinstance(p.module, PreTrainedModel) else facts.libraries.get(p.folder, "diffusers"),
            type(p.module).__name__,
        )
        for p in parts
    }
    if facts.processor and _seeing(parts):
        classes[facts.processor] = ("transformers", "CLIPImageProcessor")
    said = checkpoint.header.configs.get(INDEX_FILE, {})
    return {
        "_class_name": _class_name(facts, parts, said.get(CLASS)),
        "_diffusers_version": diffusers.__version__,
        **facts.entries,
        **_kept_settings(facts, said),
        **{lack.folder: NOTHING for lack in lacks},
        **classes,
        **{one.folder: ("transformers", one.class_name) for one in tokenizers},
        **{place: ("diffusers", own.name) for place, own in without_weights.items()},
    }


def _class_name(facts: PipelineFacts, parts: Sequence[FolderPart], said: object) -> str:
    """The class of the pipeline. Of a folder that is the one that it `said`, where that takes the same: one that edits
    images (FluxKontextPipeline) has the model of one that makes them, and no tensor tells."""
    model = next((part.config for part in parts if part.role is Role.DIFFUSION_MODEL), None)
    name = pipeline_name(facts, model or {})
    if said in (name, None) or name != facts.name:  # else nothing of diffusers' pipelines is imported for it
        return name
    other = getattr(diffusers, said, None) if isinstance(said, str) else None
    if not (isinstance(other, type) and issubclass(other, DiffusionPipeline)):
        return name
    own, theirs = (inspect.signature(kind).parameters.keys() for kind in (getattr(diffusers, name), other))
    return other.__name__ if own == theirs else name


def _kept_settings(facts: PipelineFacts, said: Mapping[str, Any]) -> dict[str, Any]:
    """What the index of a folder `said` of the settings that are written, which no tensor tells; but not of parts that
    are left out."""
    return {
        key: said[key]
        for key, own in facts.entries.items()
        if isinstance(own, (bool, int, float)) and type(said.get(key)) is type(own) and key not in _OF_LEFT_OUT
    }
