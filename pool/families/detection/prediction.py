"""Read the prediction type of a diffusion model from its file. Torch-free and pure.

Shapes do not tell whether a model predicts noise, velocity or a clean image. Some files have a tensor for it, some a
metadata entry; otherwise the family decides.

Sources: the tensors that trainers of SD and SDXL models add (v_pred, ztsnr, edm_mean, edm_vpred.*); the ModelSpec
standard of metadata.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from modelpool.pool.families.detection.file_facts import PredictionHint

#: empty marker tensors: velocity prediction; zero terminal SNR
VELOCITY_MARK, ZERO_TERMINAL_MARK = "v_pred", "ztsnr"
#: the most reliable first; it wins over contradicting ones
_TENSORS: tuple[tuple[str, str], ...] = (
    ("edm_vpred.sigma_max", "edm-v"),
    ("edm_mean", "edm"),
    (VELOCITY_MARK, "v"),
    (ZERO_TERMINAL_MARK, "zero-terminal-snr"),
)
#: our names for noise and velocity prediction
NOISE_WORD, VELOCITY_WORD = "epsilon", "v"
#: tensors that state the noise schedule, not the prediction type
_OF_NOISE = frozenset({"edm-v", "edm", "zero-terminal-snr"})
#: metadata entries; the first is from ModelSpec
PREDICTION_KEY = "modelspec.prediction_type"
PREDICTION_ENTRIES = (PREDICTION_KEY, "modelspec.predict_key")
#: alternative notations
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
    """Return the hints on the prediction type in `keys` and `metadata` of a file."""
    by_tensor = [PredictionHint(kind, f"tensor {key}") for key, kind in _TENSORS if key in keys]
    by_entry = [
        PredictionHint(normalised_prediction(metadata[entry]), f"metadata {entry}")
        for entry in PREDICTION_ENTRIES
        if metadata.get(entry, "").strip()
    ]
    return (*by_tensor, *by_entry)


def declared_prediction(keys: Collection[str], metadata: Mapping[str, str]) -> str | None:
    """Return the prediction type stated by `keys` and `metadata` of a file, the most reliable one; None if there is
    none."""
    hints = prediction_hints(keys, metadata)
    return next((hint.kind for hint in hints if hint.kind not in _OF_NOISE), None)


def normalised_prediction(written: str) -> str:
    """Return a prediction type in our notation; unknown ones unchanged."""
    return _WORDS.get(written.strip().lower(), written.strip())
