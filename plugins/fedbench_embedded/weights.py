"""The weights of ``clip:embedded``, checked against their card and loaded."""

from __future__ import annotations

import json
from pathlib import Path

import open_clip

from fedbench.core.errors import FedbenchError
from fedbench.models.clip.backbone import ClipBackbone
from fedbench.models.clip.loading import load_weights
from fedbench.models.names import BackboneName
from fedbench.models.weight_files import check_digest
from fedbench_embedded.tokens import FoldedTokenizer

FOLDER = Path(__file__).parent


def load(name: str) -> ClipBackbone:
    """The model, called ``name``. FedbenchError where a file is missing, or another than the card's."""
    weights, config, tokens = (FOLDER / f"embedded{end}" for end in (".safetensors", ".json", "_tokens.json"))
    for file in (weights, config, tokens):
        if not file.is_file():
            raise FedbenchError(f"backbone 'clip:embedded': {str(file)!r} is missing; reinstall fedbench.")
    card = FOLDER / "embedded_card.json"
    if card.is_file():
        check_digest(weights, json.loads(card.read_text())["sha256"], "reinstall fedbench")
    stored = json.loads(config.read_text())
    # pretraining rewrites the config, and tests point elsewhere: register what differs from the last load
    if open_clip.get_model_config("embedded") != stored:
        open_clip.add_model_config(config)
    parsed, tokenizer = BackboneName(name, "clip", "embedded"), FoldedTokenizer.from_file(tokens)
    return load_weights(parsed, weights, {}, quick_gelu=None, tokenizer=tokenizer)
