"""What a file says about the meaning of its diffusion model's output. Torch-free and pure.

Shapes do not tell whether a model was trained to give noise, velocity or a clean image. Some files carry a tensor
for it, some an entry among their metadata; most say nothing, and then the family decides.
Sources: the tensors that trainers of SD and SDXL models add (v_pred, ztsnr, edm_mean, edm_vpred.*); the ModelSpec
standard of metadata.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from modelpool.pool.detection.facts import PredictionHint

#: empty tensors that say: it predicts velocity; the last level of noise is noise alone
VELOCITY_MARK, ZERO_TERMINAL_MARK = "v_pred", "ztsnr"
#: the surest first; the first of two that say different things is meant
_TENSORS: tuple[tuple[str, str], ...] = (
    ("edm_vpred.sigma_max", "edm-v"),
    ("edm_mean", "edm"),
    (VELOCITY_MARK, "v"),
    (ZERO_TERMINAL_MARK, "zero-terminal-snr"),
)
#: in our spelling: what a model says that predicts noise, or velocity
NOISE_WORD, VELOCITY_WORD = "epsilon", "v"
#: kinds of tensors that tell of the noise, and not of what is predicted
_OF_NOISE = frozenset({"edm-v", "edm", "zero-terminal-snr"})
#: metadata that say it; the first is that of ModelSpec
PREDICTION_KEY = "modelspec.prediction_type"
PREDICTION_ENTRIES = (PREDICTION_KEY, "modelspec.predict_key")
#: the ways in which the same thing is written
_WORDS: Mapping[str, str] = {
    "v": "v",
    "v_prediction": "v",
    "v-prediction": "v",
    "vpred": "v",
    "epsilon": "epsilon",
    "eps": "epsilon",
    "flow": "flow",
    "flow_prediction": "flow",
    "sample": "sample",
}


def prediction_hints(keys: Collection[str], metadata: Mapping[str, str]) -> tuple[PredictionHint, ...]:
    """What `keys` and `metadata` of a file say of its predictions."""
    by_tensor = [PredictionHint(kind, f"tensor {key}") for key, kind in _TENSORS if key in keys]
    by_entry = [
        PredictionHint(prediction_word(metadata[entry]), f"metadata {entry}")
        for entry in PREDICTION_ENTRIES
        if metadata.get(entry, "").strip()
    ]
    return (*by_tensor, *by_entry)


def said_prediction(keys: Collection[str], metadata: Mapping[str, str]) -> str | None:
    """What `keys` and `metadata` of a file say that its model predicts, the surest of them; None when nothing does."""
    hints = prediction_hints(keys, metadata)
    return next((hint.kind for hint in hints if hint.kind not in _OF_NOISE), None)


def prediction_word(written: str) -> str:
    """A kind of prediction in our spelling; what is not known stays as it is written."""
    return _WORDS.get(written.strip().lower(), written.strip())
