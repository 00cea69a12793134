"""Which columns of a Hugging Face data set hold images, labels and domains: by feature type, or as the user says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedbench.core.errors import FedbenchError, unknown_name
from fedbench.datasets.names import DatasetName


@dataclass(frozen=True)
class Columns:
    """The columns that are read."""

    image: str
    label: str
    domain: str | None
    client: str | None = None
    """Whom samples come from: names, or numbers."""


def choose_columns(parsed: DatasetName, features: Mapping[str, Any]) -> Columns:
    """The columns the options name; the image and the label column are otherwise the only ones of their type."""
    for option in ("image", "label", "domain", "client"):
        column = parsed.options.get(option)
        if column is not None and column not in features:
            raise unknown_name(f"column of {parsed.location!r}", column, features)
    domain, client = parsed.options.get("domain"), parsed.options.get("client")
    image = parsed.options.get("image") or _only(
        parsed, "image", [name for name, feature in features.items() if _is_image(feature)], features
    )
    if not _is_image(features[image]):
        raise FedbenchError(f"{parsed.location!r}: column {image!r} holds no images; type ?image=COLUMN with another.")
    labels = [name for name, feature in features.items() if _is_class_label(feature) and name not in (domain, client)]
    # Parquet written by other tools carries plain integers.
    labels = labels or [
        name for name, feature in features.items() if _is_integer(feature) and name not in (domain, client)
    ]
    label = parsed.options.get("label") or _only(parsed, "label", labels, features)
    for option, column, fits in (
        ("label", label, _is_category(features[label]) or _is_integer(features[label])),
        ("domain", domain, domain is None or _is_category(features[domain])),
        ("client", client, client is None or _is_category(features[client]) or _is_integer(features[client])),
    ):
        if not fits:
            raise FedbenchError(
                f"{parsed.location!r}: column {column!r} holds no class labels and no strings; "
                f"type ?{option}=COLUMN with another."
            )
    return Columns(image, label, domain, client)


def _only(parsed: DatasetName, kind: str, found: Sequence[str], features: Mapping[str, Any]) -> str:
    if len(found) == 1:
        return found[0]
    several = f"several {kind} columns ({', '.join(found)})" if found else f"no {kind} column by its type"
    raise FedbenchError(
        f"{parsed.location!r} has {several}; choose with ?{kind}=COLUMN, one of {', '.join(found or features)}."
    )


def _is_image(feature: Any) -> bool:
    import datasets

    # Written without feature types, an Image column shows as the struct it is stored as.
    return isinstance(feature, datasets.Image) or (isinstance(feature, dict) and set(feature) == {"bytes", "path"})


def _is_class_label(feature: Any) -> bool:
    import datasets

    return isinstance(feature, datasets.ClassLabel)


def _is_category(feature: Any) -> bool:
    return _is_class_label(feature) or getattr(feature, "dtype", None) in ("string", "large_string")


def _is_integer(feature: Any) -> bool:
    return str(getattr(feature, "dtype", "")).startswith(("int", "uint")) and not _is_class_label(feature)
