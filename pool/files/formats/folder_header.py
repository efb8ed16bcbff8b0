"""Reads the components of a diffusers folder as one `Header`. Torch-free; reads headers and small JSON files.

The keys of a component's tensors begin with the name of its folder, "unet.conv_in.weight", except for a model that is
part of another one; the configurations of the components are in `Header.configs`. Components that generate no image
(safety checkers, tokenizers) are left out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from modelpool.pool.files.formats.model_folder import INDEX_FILE, FolderComponent, read_model_folder
from modelpool.pool.files.formats.safetensors_file import Header, TensorEntry
from modelpool.pool.values.core.errors import CorruptFile

#: folder of the model with which Stable Audio embeds durations
PROJECTION = "projection_model"
#: folder of the model with which Stable Audio 3 embeds them
DURATION_FOLDER = "duration_embedder"
#: the folder with statistics of image embeddings (unCLIP)
NORMALIZER = "image_normalizer"
#: the text encoder of OmniGen 2, a model of words and images
WORDS_AND_IMAGES = "mllm"
#: the folder with the projection of views (Zero123)
VIEW_PROJECTION = "cc_projection"
#: folders of LTX-2: what joins the states of the text encoder, and what decodes audio
CONNECTORS, AUDIO_VAE, VOCODER = "connectors", "audio_vae", "vocoder"
#: what decodes audio, in the order of its steps
AUDIO_FOLDERS = (AUDIO_VAE, VOCODER)
#: the folder of a language model that writes tokens of images
WRITER_FOLDER = "vision_language_encoder"
#: folder of the model with which ACE-Step 1.5 encodes texts and lyrics
CONDITION_ENCODER = "condition_encoder"
#: the folder of a model without texts that guides another one (Ideogram 4), of which its tensors are a part
UNCONDITIONAL_FOLDER = "unconditional_transformer"
#: where the keys of a folder begin, if not with its name
_PLACES = {UNCONDITIONAL_FOLDER: "transformer.unconditional"}
#: component folders with weights that are read
COMPONENT_FOLDERS = (
    *("unet", "transformer", "transformer_2", UNCONDITIONAL_FOLDER, "prior", "decoder", "vae", "vqgan"),
    *("text_encoder", "text_encoder_2", "text_encoder_3", "text_encoder_4", "image_encoder"),
    *(PROJECTION, DURATION_FOLDER, NORMALIZER, VIEW_PROJECTION, CONNECTORS, AUDIO_VAE, VOCODER),
    WRITER_FOLDER,
    WORDS_AND_IMAGES,
    CONDITION_ENCODER,
)
#: key in `Header.configs`: the class of each component, from the model's index
CLASS_KEY = "_class_name"


def read_folder_header(path: str | os.PathLike[str], read: Callable[[str], Header], variant: str = "") -> Header:
    """Read the headers of the folder at `path`; `read` reads a weights file, or the index of several.

    Raises CorruptFile and UnsafeFile as `read_model_folder` does, CorruptFile for a folder without weights that are
    read, and whatever `read` raises.
    """
    folder = read_model_folder(path, variant=variant)
    tensors: dict[str, TensorEntry] = {}
    files: dict[str, int] = {}
    metadata: Mapping[str, str] = {}
    for name in COMPONENT_FOLDERS:
        part = folder.components.get(name)
        if part is None or not part.weights:
            continue
        header, place = read(part.weights), _PLACES.get(name, name)
        for key, entry in header.tensors.items():
            tensors[f"{place}.{key}"] = replace(entry, name=f"{place}.{key}", path=header.path_of(key))
        files |= header.files
        metadata = metadata or header.metadata
    if not tensors:
        raise CorruptFile(
            f"{folder.path}: holds no weights of {', '.join(COMPONENT_FOLDERS)}, expected some of these folders"
        )
    configs = {name: _config(part) for name, part in folder.components.items()}
    index = {INDEX_FILE: {**folder.settings, CLASS_KEY: folder.pipeline}}
    return Header(folder.path, sum(files.values()), tensors, metadata, files, {**configs, **index})


def _config(part: FolderComponent) -> dict[str, Any]:
    return {**part.config, CLASS_KEY: part.class_name}
