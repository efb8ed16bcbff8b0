"""Joins separate files into one checkpoint: a `Header` in which each part has its keys of a complete file. Torch-free.

Everything that works on a `Header` (families, key maps, quantization, patches, saving) treats it like a single file.
The keys of a file determine what it is; the user only states which files belong together. Reads headers and markers, no
weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from modelpool.pool.families.detection.detect_diffusion_model import DiffusionFacts
from modelpool.pool.families.detection.file_facts import Kind
from modelpool.pool.families.detection.parts import split
from modelpool.pool.families.detection.text_encoders import (
    MEMBERS,
    SIGNATURES,
    TextEncoderFacts,
    recognise_text_encoder,
    stands_for,
)
from modelpool.pool.families.detection.vaes import recognise_vae
from modelpool.pool.families.parts.located_family import Architecture, LocatedFamily
from modelpool.pool.families.supported import LIST, why_not
from modelpool.pool.families.text_readings import OPTIONAL_ENCODERS, ROW_OF
from modelpool.pool.families.transformer_families import TRANSFORMERS, UNCONDITIONAL
from modelpool.pool.families.two_experts import misassigned
from modelpool.pool.families.unet_families import FAMILIES, VIDEO_UNETS, look_alike
from modelpool.pool.files.formats.safetensors_file import Header, TensorEntry
from modelpool.pool.models.loading.assembled_parts import (
    AssemblyPart,
    bundled_second_model,
    diffusion_model_of,
    keys_of_model,
    markers_of,
    part_of,
    second_model,
    swapped_unconditional,
    unconditional_model,
    without_prefix,
)
from modelpool.pool.models.loading.vision_fit import vision_encoder_name
from modelpool.pool.values.core.assembly import Assembly
from modelpool.pool.values.core.errors import MissingParts, UnknownArchitecture
from modelpool.pool.values.specs.spec import Role
from modelpool.pool.weights.quant.detect_layers import METADATA_KEY as QUANTIZATION_KEY

#: the layer that cuts images into patches, as open_clip and transformers name it, and its dimensions in supported
#: models
_PATCHES, _PATCHES_DIMENSIONS = ("conv1.weight", "vision_model.embeddings.patch_embedding.weight"), 4
#: text encoders of other widths have no published size: only their position determines which they are
_WIDTHS = {
    "clip_l": 768, "clip_g": 1280, "clip_h": 1024, "t5_base": 768, "t5xl": 2048, "t5xxl": 4096, "gemma3_4b": 2560,
}  # fmt: skip
_ARCHITECTURES: Mapping[str, str] = {row.facts.name: row.facts.architecture for row in SIGNATURES}


@dataclass(frozen=True, slots=True)
class MissingComponent:
    """A component that an assembly needs and lacks.

    role   its role
    kind   its kind
    names  of the text encoders that can be it, or of the latent formats that a VAE must support
    """

    role: Role
    kind: Kind
    names: tuple[str, ...]

    def fits(self, facts_name: str, latent_formats: Sequence[str]) -> bool:
        """Whether a component of `kind` that is recognised as `facts_name`, a VAE with `latent_formats`, can be it."""
        return bool({facts_name, *latent_formats} & set(self.names))


@dataclass(frozen=True, slots=True)
class AssemblyProblems:
    """The reasons why separate files do not make a model.

    text     all of them as text; empty if there are none
    missing  the components that are missing
    """

    text: str
    missing: tuple[MissingComponent, ...]


def assembled_header(assembly: Assembly, read: Callable[[str], Header]) -> Header:
    """Return all files of `assembly` as one header; `read` reads one.

    Raises MissingParts naming a part that is missing or of another model, UnknownArchitecture for a diffusion
    model that this version does not run, and whatever `read` raises.
    """
    assembler, short = _assemble(assembly, read)
    if short.text:
        raise MissingParts(f"{assembly.path}: {short.text}")
    return assembler.header()


def assembly_problems(assembly: Assembly, read: Callable[[str], Header]) -> AssemblyProblems:
    """Return what `assembly` lacks besides its files, and which of them do not belong to it. Raises as
    `assembled_header`, except for these."""
    return _assemble(assembly, read)[1]


@dataclass(slots=True)
class _Assembler:
    """A checkpoint under construction."""

    path: str
    family: LocatedFamily
    metadata: Mapping[str, str]
    files: dict[str, int]
    tensors: dict[str, TensorEntry]
    #: settings of quantized layers from the metadata of files, by the layer's new name
    quantized: dict[str, object]

    def add(self, role: Role, part: AssemblyPart) -> None:
        """Put a component in its place, including the extra tensors stored with its weights."""
        prefix = self.family.prefixes[role]
        self.remove(role)
        self.take(part.header, {key: prefix + bare for bare, key in part.keys.items()})

    def take(self, header: Header, names: Mapping[str, str]) -> None:
        """Add the tensors of `header` that `names` renames, and no others."""
        for key, name in names.items():
            self.tensors[name] = replace(header.tensors[key], name=name, path=header.path_of(key))
        self.files |= header.files
        self.quantized |= _renamed_layers(header, names)

    def remove(self, role: Role) -> None:
        """Remove a component."""
        prefix = self.family.prefixes[role]
        self.tensors = {name: entry for name, entry in self.tensors.items() if not name.startswith(prefix)}
        self.quantized = {name: settings for name, settings in self.quantized.items() if not name.startswith(prefix)}

    def header(self) -> Header:
        """Return the header of everything added."""
        metadata = {key: text for key, text in self.metadata.items() if key != QUANTIZATION_KEY}
        if self.quantized:
            metadata[QUANTIZATION_KEY] = json.dumps({"layers": self.quantized})
        used = {entry.path for entry in self.tensors.values()}
        files = {path: size for path, size in self.files.items() if path in used}
        return Header(self.path, sum(files.values()), self.tensors, metadata, files)


def _assemble(assembly: Assembly, read: Callable[[str], Header]) -> tuple[_Assembler, AssemblyProblems]:
    base = read(assembly.checkpoint) if assembly.checkpoint else None
    main = read(assembly.diffusion_model) if assembly.diffusion_model else base
    assert main is not None, "an Assembly has one of them"
    model = diffusion_model_of(main)
    encoders = [_text_encoder(read(file)) for file in assembly.text_encoders]
    family, placed, problems = _family(main.path, model, encoders, () if base is None else tuple(base.tensors))
    assembler = _Assembler(assembly.path, family, main.metadata, {}, {}, {})
    if base is not None:
        keys = _of_components(base) if main is not base else base.tensors
        assembler.take(base, {key: key for key in keys})
    if main is not base:
        part = part_of(main, keys_of_model(main, model))
        assembler.add(Role.DIFFUSION_MODEL, replace(part, keys=without_prefix(part.keys, model.prefix)))
        assembler.take(main, {key: key for key in markers_of(main, model)})
    if assembly.low_noise:
        problems += _add_second(assembler, main, read(assembly.low_noise), model)
    elif main is not base:
        problems += _keep_second(assembler, (main, base), model)
    if assembly.unconditional:
        prefix = model.prefix if main is base else family.prefixes[Role.DIFFUSION_MODEL]
        problems += _add_unconditional(assembler, main, read(assembly.unconditional), model, prefix)
    if assembly.vae and Role.VAE not in family.prefixes:
        problems.append(f"{assembly.vae} is its VAE, which is not used: {family.title} has none")
    elif assembly.vae:
        assembler.remove(Role.VAE)
        vae = _vae(read(assembly.vae), model, family)
        if isinstance(vae, str):
            problems.append(vae)
        else:
            assembler.add(Role.VAE, vae)
    if assembly.vision_encoder:
        seeing = _vision_encoder(read(assembly.vision_encoder), family)
        if isinstance(seeing, str):
            problems.append(seeing)
        else:
            assembler.add(Role.VISION_ENCODER, seeing)
    for role, encoder in placed.items():
        assembler.add(role, encoder.part)
    missing = tuple(_missing_components(assembler, model))
    return assembler, AssemblyProblems("; ".join([*problems, *_missing_text(family, missing)]), missing)


def _add_second(assembler: _Assembler, main: Header, low: Header, model: DiffusionFacts) -> list[str]:
    """Add the diffusion model of `low` as the low-noise expert next to `model`, the one of `main`; return the
    reasons if that is impossible."""
    try:
        assembler.family, part = second_model(low, model)
    except UnknownArchitecture as error:
        return [str(error)]
    assembler.add(Role.DIFFUSION_MODEL_2, part)
    misplaced = misassigned(main.path, low.path)
    return [misplaced] if misplaced else []


def _add_unconditional(
    assembler: _Assembler, main: Header, other: Header, model: DiffusionFacts, prefix: str
) -> list[str]:
    """Add the diffusion model of `other` to `model`, the one of `main` with keys that begin with `prefix`, as the
    one that predicts without a text; return the reasons if that is impossible."""
    name = UNCONDITIONAL.get(assembler.family.name)
    if name is None:
        return [
            f"{other.path} is for predictions without a text, but {assembler.family.title} needs no model for these"
        ]
    try:
        part = unconditional_model(other, model, name)
    except UnknownArchitecture as error:
        return [str(error)]
    start = f"{prefix}{name}."
    assembler.tensors = {key: entry for key, entry in assembler.tensors.items() if not key.startswith(start)}
    assembler.take(part.header, {key: start + bare for bare, key in part.keys.items()})
    swapped = swapped_unconditional(main.path, other.path)
    return [swapped] if swapped else []


def _keep_second(assembler: _Assembler, files: Iterable[Header | None], model: DiffusionFacts) -> list[str]:
    """Keep the second expert that the first of `files` with one contains; return the reasons if it makes no pair with
    `model`."""
    for file in files:
        try:
            found = None if file is None else bundled_second_model(file, model)
        except UnknownArchitecture as error:
            return [str(error)]
        if found is not None:
            assembler.family, part = found
            assembler.add(Role.DIFFUSION_MODEL_2, part)
            return []
    return []


@dataclass(frozen=True, slots=True)
class _TextEncoder:
    part: AssemblyPart
    facts: TextEncoderFacts

    @property
    def is_published(self) -> bool:
        """Whether its name is certain: it has the size of published models of that name."""
        return self.facts.width == _WIDTHS.get(self.facts.name, self.facts.width)


def _family(
    model_path: str, model: DiffusionFacts, encoders: Sequence[_TextEncoder], present: Collection[str]
) -> tuple[LocatedFamily, dict[Role, _TextEncoder], list[str]]:
    """Return the family, the role of each text encoder in it, and the encoders without a role, as text. Of two families
    that look alike at unpublished sizes, the one with text encoders that are passed or among the keys `present`.
    """
    alike = look_alike(model.name)
    names = {model.name, *(() if alike is None else (alike.name,))}
    known = (*FAMILIES, *VIDEO_UNETS, *TRANSFORMERS.values())
    candidates = sorted((f for f in known if f.name in names), key=lambda family: family.name != model.name)
    if not candidates:
        raise UnknownArchitecture(
            f"{model_path}: recognised as {model.title}, which this version cannot run yet: "
            f"{why_not(model.runs)} ({LIST} lists what runs)"
        )

    def faults(family: LocatedFamily) -> tuple[int, int]:
        placed = _places(family, encoders)
        missing = (
            role
            for role in family.text_encoders
            if role not in placed and not any(key.startswith(family.prefixes[role]) for key in present)
        )
        return len(encoders) - len(placed), sum(1 for _ in missing)

    family = min(candidates, key=faults)
    placed = _places(family, encoders)
    wanted = ", ".join(members_of(family))
    without_place = [encoder for encoder in encoders if not any(encoder is each for each in placed.values())]
    problems = [
        f"{encoder.part.header.path} is {encoder.facts.title}, which is not used: {family.title} reads {wanted}"
        for encoder in without_place
    ]
    return family, placed, problems


def _places(family: LocatedFamily, encoders: Sequence[_TextEncoder]) -> dict[Role, _TextEncoder]:
    """Return the role of each of `encoders` that has one: published sizes by name, the others in order where
    a text encoder of their key naming is left."""
    members = dict(zip(family.text_encoders, members_of(family), strict=False))
    placed: dict[Role, _TextEncoder] = {}
    for encoder in sorted(encoders, key=lambda each: not each.is_published):
        free = [role for role in members if role not in placed]
        if encoder.is_published:
            named = (encoder.facts.name, *stands_for(encoder.facts.name))
            fitting = [role for role in free if members[role] in named]
        else:
            alike = [role for role in free if _ARCHITECTURES.get(members[role]) == encoder.facts.architecture]
            fitting = sorted(alike, key=lambda role: not _has_layout(family, role, encoder.facts))
        if fitting:
            placed[fitting[0]] = encoder
    return {role: placed[role] for role in members if role in placed}


def members_of(family: LocatedFamily) -> tuple[str, ...]:
    """Return the names of the text encoders of `family`, in its order."""
    if family.text_set:
        return tuple(facts.encoder for facts in family.texts.values())
    return MEMBERS.get(family.name) or MEMBERS.get(family.relative, ())


def _has_layout(family: LocatedFamily, role: Role, facts: TextEncoderFacts) -> bool:
    return (family.architectures[role] is Architecture.OPEN_CLIP_TEXT) == (facts.layout == "open_clip")


def _text_encoder(header: Header) -> _TextEncoder:
    for part in _of_kind(header, Kind.TEXT_ENCODER):
        facts = recognise_text_encoder(part.shapes)
        if facts is not None:
            return _TextEncoder(part, facts)
    raise MissingParts(f"{header.path}: found no known text encoder in it, expected one")


def _vae(header: Header, model: DiffusionFacts, family: LocatedFamily) -> AssemblyPart | str:
    """Return the VAE in a file, or why the model cannot have it. Raises MissingParts for a file without one."""
    for part in _of_kind(header, Kind.VAE):
        dtypes = {bare: header.tensors[key].dtype for bare, key in part.keys.items()}
        facts = recognise_vae(part.shapes, dtypes)
        if facts is None:
            continue
        if model.latent and facts.latent_formats and model.latent not in facts.latent_formats:
            return (
                f"{header.path} is the VAE of {facts.title}, whose latents are those of "
                f"{' or '.join(facts.latent_formats)}, and {family.title} has those of {model.latent}"
            )
        return part
    raise MissingParts(f"{header.path}: found no known VAE in it, expected one")


def _vision_encoder(header: Header, family: LocatedFamily) -> AssemblyPart | str:
    """Return the vision encoder in a file, or why the model has no use for it. Raises MissingParts for a file without
    one.

    Encoders of an unpublished size have no name; their role follows from their position.
    """
    for part in _of_kind(header, Kind.VISION_ENCODER):
        if not any(len(part.shapes.get(key, ())) == _PATCHES_DIMENSIONS for key in _PATCHES):
            continue
        if Role.VISION_ENCODER not in family.prefixes:
            return f"{header.path} is a vision encoder, which is not used: {family.title} reads no images"
        return part
    raise MissingParts(f"{header.path}: found no vision encoder in it, expected a CLIP one")


def _of_kind(header: Header, kind: Kind) -> Iterable[AssemblyPart]:
    """Yield the components of `kind` in a file: those with a prefix, else the complete file as one."""
    found = split(header.tensors)
    prefixed = [(prefix, keys) for (of, prefix), keys in found.items() if of is kind]
    for prefix, keys in prefixed:
        part = part_of(header, keys)
        yield replace(
            part,
            keys=without_prefix(part.keys, prefix),
            shapes={k.removeprefix(prefix): s for k, s in part.shapes.items()},
        )
    if not prefixed:
        yield part_of(header, header.tensors)


def _of_components(base: Header) -> list[str]:
    """Return the keys of all components of a checkpoint except its diffusion model and markers about that."""
    return [key for keys in split(base.tensors).values() for key in keys]


def _renamed_layers(header: Header, names: Mapping[str, str]) -> dict[str, object]:
    """Return the metadata of `header` about quantized layers with weights among `names`, by their new names."""
    text = header.metadata.get(QUANTIZATION_KEY)
    layers = json.loads(text).get("layers", {}) if text else {}  # `layers_in_file` has read it
    renamed = ((names.get(f"{layer}.weight"), settings) for layer, settings in layers.items())
    return {name.removesuffix(".weight"): settings for name, settings in renamed if name is not None}


def _missing_components(assembler: _Assembler, model: DiffusionFacts) -> Iterable[MissingComponent]:
    """Yield the components that are missing."""
    members = dict(zip(assembler.family.text_encoders, members_of(assembler.family), strict=False))
    present = {
        role
        for role, prefix in assembler.family.prefixes.items()
        if any(n.startswith(prefix) for n in assembler.tensors)
    }
    reads_any = any(role.is_text_encoder for role in present)
    optional = (
        OPTIONAL_ENCODERS.get(ROW_OF.get(assembler.family.text_set, ""), frozenset()) if reads_any else frozenset()
    )
    for role in assembler.family.prefixes:
        if role in present:
            continue
        if role is Role.VAE:
            yield MissingComponent(role, Kind.VAE, (model.latent,))
        elif role is Role.VISION_ENCODER:
            yield MissingComponent(role, Kind.VISION_ENCODER, (vision_encoder_name(assembler.family),))
        elif role.is_text_encoder and members.get(role, "") not in optional:
            yield MissingComponent(role, Kind.TEXT_ENCODER, (members.get(role, ""),))


def _missing_text(family: LocatedFamily, missing: Sequence[MissingComponent]) -> Iterable[str]:
    """Yield the missing components, as text; nothing without any."""
    titles = {Role.VAE: "a VAE with latents of", Role.VISION_ENCODER: "the vision encoder"}
    wanted = [f"{titles.get(component.role, 'the text encoder')} {component.names[0]}" for component in missing]
    if wanted:
        members = ", ".join(
            (*members_of(family), *([vision_encoder_name(family)] if family.sampling.vision_use else []))
        )
        reads = f": {family.title} reads {members}" if members else f" for {family.title}"
        yield f"{' and '.join(wanted)} {'is' if len(wanted) == 1 else 'are'} missing{reads}"
