"""Finds the tokenizer of a text encoder: in a folder that a person names, inside the file of weights, or beside it.

What is accepted, in this order: tokenizer.json; spiece.model or tokenizer.model; tekken.json; vocab.json with
merges.txt; vocab.txt. Inside a file of weights: tensors of bytes, as ComfyUI's files of UMT5, Gemma and Mistral carry
them, or the entries of a GGUF file. A vocabulary that has not the special tokens, or not about as many tokens as the
encoder, or a token that it has no row for, is another's and passed over; so is one that cannot read every text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from torch import Tensor

from modelpool.pool.core.errors import CorruptFile, UnusableField, UserError
from modelpool.pool.formats.gguf_entries import has_gguf_start
from modelpool.pool.formats.gguf_parts import stem_of
from modelpool.pool.formats.regular_file import MAX_TEXT_BYTES, read_text_file
from modelpool.pool.text.gguf_tokenizer import gguf_tokenizer
from modelpool.pool.text.sentencepiece_file import sentencepiece_tokenizer
from modelpool.pool.text.tekken_file import tekken_tokenizer
from modelpool.pool.text.text_tokenizer import TOKENIZER_FACTS, TextTokenizer, TokenizerMissing, byte_tokenizer
from modelpool.pool.text.tokenizer_errors import faults_become
from modelpool.pool.text.word_patterns import QWEN_WORDS

#: an encoder's table of tokens is a little longer than its tokenizer's; one of less than this part of it is another's
LEAST_PART = 0.5
#: tensors of bytes, and what their bytes are a file of
TENSORS: Mapping[str, str] = {
    "tokenizer_json": "tokenizer.json", "spiece_model": "spiece.model", "tekken_model": "tekken.json",
}  # fmt: skip
#: words, and signs that no vocabulary has a token for: those for private use, and one for nothing at all
_STRANGE_TEXTS = ("a red cat, 12 dogs", "\ue000", "a\U0010fffdb \ufdd0 \x00")


def find_tokenizer(
    kind: str,
    vocabulary: int,
    *,
    folder: Path | None = None,
    tensors: Mapping[str, Tensor] | None = None,
    weights: Path | None = None,
) -> TextTokenizer:
    """The tokenizer of a text encoder of `kind` whose table has `vocabulary` tokens.

    folder   where a person says it is; then nowhere else is looked
    tensors  of the file of weights, without prefix: those of `TENSORS` among them may be it
    weights  the file of weights, beside which it may lie (`folders_beside`)
    ByT5's needs no file.
    Raises TokenizerMissing that says what was looked at, and what to put where; CorruptFile for a damaged file in a
    folder that a person named.
    """
    if kind == "byt5":
        return TextTokenizer(byte_tokenizer(), kind, "bytes")
    passed: list[str] = []
    for source, read in _candidates(kind, folder, tensors or {}, weights):
        try:
            found = TextTokenizer(read(), kind, source)
            _check_reads_all(found)
        except UserError as error:
            if folder is not None and isinstance(error, CorruptFile):
                raise
            passed.append(str(error))
            continue
        if not LEAST_PART * vocabulary <= found.size <= vocabulary:
            passed.append(f"{source}: found {found.size} tokens, expected about the encoder's {vocabulary}")
        elif found.last_id >= vocabulary:
            passed.append(f"{source}: found a token of number {found.last_id}, expected those below {vocabulary}")
        else:
            return found
    facts = TOKENIZER_FACTS[kind]
    if folder is None and weights is not None:
        folder = weights.parent
        where = f"into {folder / 'tokenizer'}, or beside the weights as {stem_of(weights)}.tokenizer.json"
    else:
        where = f"into {folder}" if folder is not None else "into a folder, and name the folder"
    looked = "".join(f"; {reason}" for reason in passed)
    raise TokenizerMissing(f"tokenizer of {facts.title}: found none{looked}. Put {facts.published} {where}")


def _check_reads_all(tokenizer: TextTokenizer) -> None:
    """Raises CorruptFile for a tokenizer that raises where it knows no token for a sign."""
    try:
        for text in _STRANGE_TEXTS:
            tokenizer.encode(text)
    except UnusableField as error:
        raise CorruptFile(f"{tokenizer.source}: found a tokenizer that cannot read every text: {error}") from error


def folders_beside(weights: Path) -> tuple[Path, ...]:
    """Folders in which the tokenizer of a file of weights may lie, the likeliest first.

    A folder of its own name; the folder it is in, for a folder that is a model; `tokenizer*` in that, and, for
    `text_encoder_2/model.safetensors` of diffusers, `tokenizer_2` beside it before the others.
    """
    here = weights.parent
    own = here.name.removeprefix("text_encoder")
    near = [here / stem_of(weights), here, *sorted(here.glob("tokenizer*"))]
    if own != here.name:
        siblings = sorted(here.parent.glob("tokenizer*"))
        near = [here.parent / f"tokenizer{own}", *near, *siblings]
    return tuple(dict.fromkeys(folder for folder in near if folder.is_dir()))


def _candidates(
    kind: str, folder: Path | None, tensors: Mapping[str, Tensor], weights: Path | None
) -> Iterator[tuple[str, Callable[[], Tokenizer]]]:
    if folder is not None:
        yield from _in_folders((folder, *sorted(folder.glob("tokenizer*"))))
        return
    for name, file_name in TENSORS.items():
        if name in tensors:
            yield f"tensor {name!r}", partial(_of_tensor, file_name, tensors[name], name)
    if weights is not None:
        for file_name in _ALONE:
            path = weights.with_name(f"{stem_of(weights)}.{file_name}")
            if path.is_file():
                yield str(path), partial(_of_file, file_name, path)
        if weights.is_file() and has_gguf_start(str(weights)):
            inside = f"entries of {weights}"
            yield inside, partial(gguf_tokenizer, str(weights), kind, inside)
        yield from _in_folders(folders_beside(weights))


def _in_folders(folders: Iterable[Path]) -> Iterator[tuple[str, Callable[[], Tokenizer]]]:
    for folder in folders:
        for file_name in _ALONE:
            path = folder / file_name
            if path.is_file():
                yield str(path), partial(_of_file, file_name, path)
        if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
            yield str(folder / "vocab.json"), partial(_byte_level, folder)
        if (folder / "vocab.txt").is_file():
            yield str(folder / "vocab.txt"), partial(_word_pieces, folder)


def _of_file(kind: str, path: Path) -> Tokenizer:
    return _of_bytes(kind, _read(path), str(path))


def _of_tensor(kind: str, tensor: Tensor, name: str) -> Tokenizer:
    return _of_bytes(kind, _bytes_of(tensor, name), f"tensor {name!r}")


#: files that are a tokenizer alone, the surest first
_ALONE = ("tokenizer.json", "spiece.model", "tokenizer.model", "tekken.json")


def _of_bytes(file_name: str, data: bytes, source: str) -> Tokenizer:
    if file_name == "tekken.json":
        return tekken_tokenizer(data, source)
    if file_name.endswith(".model"):
        return sentencepiece_tokenizer(data, source)
    wanted = "found no tokenizer, expected one as tokenizers writes it"
    with faults_become(lambda said: CorruptFile(f"{source}: {wanted}: {said}")):
        tokenizer = Tokenizer.from_str(data.decode("utf-8"))
        tokenizer.no_truncation()
        tokenizer.no_padding()
    return tokenizer


def _byte_level(folder: Path) -> Tokenizer:
    """Byte-pair encoding as Qwen has it, from its two files; special tokens stand in others beside them."""
    source = str(folder / "vocab.json")
    with faults_become(lambda said: CorruptFile(f"{source}: found no vocabulary with merges, expected one: {said}")):
        ids = {str(token): int(number) for token, number in _json(folder / "vocab.json").items()}
        lines = _read(folder / "merges.txt").decode("utf-8").splitlines()
        halves = (line.partition(" ") for line in lines if line and not line.startswith("#version"))
        pairs = [(first, second) for first, _, second in halves]
        tokenizer = Tokenizer(models.BPE(vocab=ids, merges=pairs))
        tokenizer.normalizer = normalizers.NFC()
        words = pre_tokenizers.Split(Regex(QWEN_WORDS), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        added = _added_tokens(folder)
        tokenizer.add_special_tokens([AddedToken(added[number], normalized=False) for number in sorted(added)])
    for number, token in added.items():
        if (own := tokenizer.token_to_id(token)) != number:
            raise CorruptFile(f"{source}: token {token!r} would be number {own}, expected {number} as files beside say")
    return tokenizer


def _added_tokens(folder: Path) -> dict[int, str]:
    """The tokens after those of the vocabulary, by number, where a file says them. Raises CorruptFile."""
    path = folder / "tokenizer_config.json"
    if path.is_file():
        listed = _json(path).get("added_tokens_decoder")
        if isinstance(listed, dict):
            with faults_become(lambda said: CorruptFile(f"{path}: found no list of added tokens: {said}")):
                return {int(number): str(token["content"]) for number, token in listed.items()}
    beside = folder / "added_tokens.json"
    if beside.is_file():
        listed = _json(beside)
        with faults_become(lambda said: CorruptFile(f"{beside}: found no list of added tokens: {said}")):
            return {int(number): str(token) for token, number in listed.items()}
    return {}


def _word_pieces(folder: Path) -> Tokenizer:
    """BERT's vocabulary, one token a line."""
    source = folder / "vocab.txt"
    with faults_become(lambda said: CorruptFile(f"{source}: found no vocabulary of BERT, expected one: {said}")):
        tokens = _read(source).decode("utf-8", "replace").splitlines()
        tokenizer = Tokenizer(models.WordPiece({token: i for i, token in enumerate(tokens)}, unk_token="[UNK]"))
        config = _json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=bool(config.get("do_lower_case", True)))
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
        tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special if token in tokens])
    return tokenizer


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(_read(path))
    except (RecursionError, UnicodeDecodeError, ValueError) as error:
        raise CorruptFile(f"{path}: found no JSON, expected an object: {error}") from error
    if not isinstance(found, dict):
        raise CorruptFile(f"{path}: found {type(found).__name__}, expected an object of JSON")
    return found


def _read(path: Path) -> bytes:
    return read_text_file(path, "a tokenizer")


def _bytes_of(tensor: Tensor, name: str) -> bytes:
    if tensor.dtype != torch.uint8 or tensor.numel() > MAX_TEXT_BYTES:
        raise CorruptFile(f"tensor {name!r}: found {tensor.numel()} of {tensor.dtype}, expected a file's bytes")
    return tensor.detach().cpu().numpy().tobytes()
