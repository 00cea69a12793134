"""All architectures of open_clip, on no device: what each is taken for, as the README of the models lists it."""

import logging
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch

from fedbench.models.clip.image_towers import CAPABILITIES, lacking

pytestmark = pytest.mark.slow

HUB: dict[str, tuple[str, dict[str, Any]]] = {
    "roberta-base": ("roberta", {}),
    "xlm-roberta-base": ("xlm-roberta", {}),
    "xlm-roberta-large": ("xlm-roberta", {"hidden_size": 1024, "num_attention_heads": 16}),
    "google/mt5-base": ("mt5", {"d_model": 768}),
    "google/mt5-xl": ("mt5", {"d_model": 2048}),
    "facebook/nllb-200-distilled-600M": ("m2m_100", {}),
    "facebook/nllb-200-distilled-1.3B": ("m2m_100", {}),
}
"""The kinds and widths of text towers whose configuration is on the hub alone."""


def capabilities(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[str, ...]]:
    """What each architecture can be asked for beside features."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    def of_hub(name: str, **_: object) -> Any:
        kind, sizes = HUB[name]
        return CONFIG_MAPPING[kind](**sizes)

    monkeypatch.setattr("open_clip.hf_model.AutoConfig.from_pretrained", of_hub)
    found = {}
    for name in open_clip.list_models():
        with torch.device("meta"):
            module = open_clip.create_model(name, pretrained_text=False, device="meta", load_weights=False)
        size = module.visual.preprocess_cfg["size"]
        assert isinstance(size, int) or size[0] == size[1], name
        found[name] = tuple(sorted(set(CAPABILITIES) - set(lacking(module)), key=CAPABILITIES.index))
    return found


def table(found: dict[str, tuple[str, ...]]) -> str:
    """A row for each set of capabilities, the largest first."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, able in found.items():
        groups.setdefault(able, []).append(name)
    rows = [
        f"| {', '.join(f'`{one}`' for one in able) or '(features alone)'} | {len(names)} | {' '.join(names)} |"
        for able, names in sorted(groups.items(), key=lambda item: -len(item[0]))
    ]
    return "\n".join(["| beside features | | architectures of open_clip |", "|---|---:|---|", *rows])


def test_every_architecture_is_taken_for_features_and_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the list differs, replace it by the one that the failure shows."""
    logging.disable(logging.WARNING)
    try:
        found = capabilities(monkeypatch)
    finally:
        logging.disable(logging.NOTSET)
    assert len(found) == len(open_clip.list_models()) >= 144
    readme = (Path(__file__).parents[2] / "harness/fedbench/models/README.md").read_text(encoding="utf-8")
    assert table(found) in readme, "\n" + table(found)


@pytest.mark.parametrize("key", ["interpolation", "resize_mode"])
def test_every_pretrained_tag_says_how_images_are_resized_in_a_known_way(key: str) -> None:
    known = {"interpolation": {"bicubic", "bilinear"}, "resize_mode": {"shortest", "squash"}}[key]
    tags = open_clip.list_pretrained()
    assert {open_clip.get_pretrained_cfg(arch, tag)[key] for arch, tag in tags} <= known and len(tags) > 150
