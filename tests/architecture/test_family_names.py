"""Facts of a family are fields of its value: no module outside of `pool/families` asks for the name of a family or of
its class in diffusers."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from modelpool.pool.families.definitions import all_definitions
from modelpool.pool.families.supported import running_families
from tests.architecture.source_tree import PACKAGES, Module, product_modules, syntax

#: modules with names of other kinds, some of which are also names of families, and the kind
OTHER_KINDS = {
    "actors/http/comfy/comfy_nodes.py": "types of text encoders in nodes of ComfyUI",
    "actors/http/comfy/comfy_pack_loaders.py": "types of text encoders in nodes of ComfyUI",
    "pool/inference/controlnets/controlnet_kinds.py": "ControlNets",
    "pool/inference/pixels/latent_pixels.py": "VAEs",
    "pool/models/components/common/diffusers_private.py": "layouts of published files",
    "pool/models/components/common/vae_config_table.py": "VAEs",
    "pool/models/components/diffusion/adapted_modules.py": "classes of diffusers that are replaced here",
    "pool/models/components/text/configs.py": "text encoders",
    "pool/models/components/text/text_encoder_classes.py": "text encoders",
    "pool/models/components/text/text_encoder_names.py": "text encoders",
    "pool/models/components/vae/codec.py": "VAEs",
    "pool/models/components/vae/vae_classes.py": "VAEs",
    "pool/models/text/text_tokenizer.py": "tokenizers",
    "scheduler/simulator/workloads/sizes.py": "models of a simulated workload",
}
#: names of families, and of their classes, that are still outside: remove entries, and add none
REMAINING = {
    "actors/http/comfy/comfy_noise_level_nodes.py": ["flux2_dev"],  # a node of ComfyUI is named after Flux 2
    "pool/models/loading/folder_family.py": ["UNet2DConditionModel"],  # the class of all UNets that read text
    "pool/models/loading/video_unet_folder.py": ["UNetSpatioTemporalConditionModel"],
}


def family_names(modules: Iterable[Module], names: frozenset[str]) -> dict[str, list[str]]:
    """The strings that are one of `names`, other than docstrings, by module."""
    found = {module.place: [text for text in strings_of(module.path) if text in names] for module in modules}
    return {place: texts for place, texts in found.items() if texts}


def strings(tree: ast.AST) -> list[str]:
    """The strings of a module, sorted; not its docstrings."""
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return sorted(
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts
    )


@cache
def strings_of(path: Path) -> list[str]:
    """The strings of a file, which both tests of all modules read."""
    return strings(syntax(path))


def known_names() -> frozenset[str]:
    """The names of all families, and of their classes in diffusers."""
    return frozenset(name for family in all_definitions() for name in (family.name, family.module))


def test_no_module_outside_the_families_names_a_family() -> None:
    """Neither in a comparison nor in a table: a new family then needs no change there."""
    modules = [module for module in product_modules(*PACKAGES) if not module.place.startswith("pool/families/")]
    found = family_names(modules, known_names())
    assert {place: texts for place, texts in found.items() if place not in OTHER_KINDS} == REMAINING
    assert OTHER_KINDS.keys() <= found.keys(), "an exception that nothing needs any longer: remove it"


def test_a_name_of_a_family_is_found_in_comparisons_and_tables() -> None:
    """Docstrings and longer texts may mention families."""
    names = known_names()
    assert {"qwen_image", "sd1", "FluxTransformer2DModel", "UNet2DConditionModel"} <= names
    for source, expected in (
        ('def f(facts):\n    return facts.model == "qwen_image"\n', ["qwen_image"]),
        ('def f(name):\n    return name.startswith("hunyuan_dit")\n', ["hunyuan_dit"]),
        ('BLOCKS = frozenset({"FluxTransformer2DModel", "other"})\n', ["FluxTransformer2DModel"]),
        ('TABLE = {"sd1": 1, "wan_t2v": 2}\n', ["sd1", "wan_t2v"]),
        ('def f():\n    "sd1"\n    return "a model of sd1"\n', []),
    ):
        assert [text for text in strings(ast.parse(source)) if text in names] == expected, source


#: modules with words that are also the beginning of a title, and what they are
WORDS_IN_TITLES = {
    "actors/http/comfy/comfy_families.py": "classes of ComfyUI",
    "actors/http/comfy/comfy_pack_parts.py": "formats of loaded videos",
    "actors/http/comfy/comfy_refused_nodes.py": "names of packs of nodes",
    "actors/http/comfy/comfy_request_fields.py": "classes of ComfyUI, and what they are called in messages",
    "pool/inference/controlnets/t2i_adapters.py": "what adapters are for, in messages",
    "pool/inference/image_prompts/open_adapter.py": "what adapters are for, in messages",
    "pool/models/components/vision/glm.py": "a title of a vision encoder",
    "pool/models/text/text_tokenizer.py": "titles of tokenizers",
}


def titles_begun(texts: Iterable[str], titles: frozenset[str]) -> list[str]:
    """The strings that are titles of families, or with which one begins: a decision by the title."""
    begins = {title[:end] for title in titles for end in range(1, len(title) + 1)}
    return [text for text in texts if len(text) > 3 and text.strip() in begins]


def known_titles() -> frozenset[str]:
    """The titles of all families that run."""
    return frozenset(family.title.removeprefix("the ") for family in running_families().values())


def test_no_module_outside_the_families_decides_by_a_title() -> None:
    """Found: the nodes of ComfyUI asked for the beginnings of titles in 17 lists: new families were missing there."""
    modules = [module for module in product_modules(*PACKAGES) if not module.place.startswith("pool/families/")]
    titles = known_titles()
    found = {module.place: titles_begun(strings_of(module.path), titles) for module in modules}
    named = {place: texts for place, texts in found.items() if texts}
    assert {place: texts for place, texts in named.items() if place not in WORDS_IN_TITLES} == {}
    assert WORDS_IN_TITLES.keys() <= named.keys(), "an exception that nothing needs any longer: remove it"
    by_titles = ast.parse('NORMED = ("Qwen-Image", "Lumina 2")\nassert title.startswith("Wan ")\n')
    assert titles_begun(strings(by_titles), titles) == ["Lumina 2", "Qwen-Image", "Wan "]
