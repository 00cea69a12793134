"""A program's own data sets, backbones, methods, partitions, metrics: their names, and what tells them from others."""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedbench.core.errors import FedbenchError, reason_of
from fedbench.core.federation import Dataset
from fedbench.core.method.base import AnyMethod, NoParams
from fedbench.core.method.hyper import declared
from fedbench.core.types import Backbone
from fedbench.datasets.content import dataset as with_its_hash
from fedbench.kinds.base import AnyPlugin, check_plugin
from fedbench.kinds.kinds import BackboneFamily, BackboneRequest, DatasetRequest, DatasetSource
from fedbench.kinds.methods import check_method
from fedbench.kinds.registry import OBJECT, find_method, method_names, registered
from fedbench.models import image_network
from fedbench.models.clip.backbone import digest_of_weights
from fedbench.plugins.provenance import digest_of_code

Network = nn.Module | type[nn.Module] | Callable[[], nn.Module]
_DIGITS = 8
"""Digits of a hash in a name."""
_SIDE = 32
"""Pixels of the images that a network is tried on where the data set's size is not known."""


@dataclass
class OwnObjects:
    """What a program brings to one call."""

    plugins: dict[tuple[str, str], type] = field(default_factory=dict)
    """The plug-ins by kind and name, as `fedbench.kinds.registry` takes them."""

    def methods(self, given: Sequence[str | type]) -> tuple[str, ...]:
        """The names of methods: a class that is registered is called as ever, another one by its ``name``."""
        return tuple(one if isinstance(one, str) else self._method(one) for one in given)

    def dataset(self, given: str | Dataset | None) -> str | None:
        """The name of a data set: ``object:NAME-`` and the beginning of its content's hash."""
        if not isinstance(given, Dataset):
            return given
        held = with_its_hash(
            given.name,
            tuple(given.classnames),
            given.train,
            given.test,
            tuple(given.domain_names),
            given.list_groups,
            given.shortest_side,
            client_names=tuple(given.client_names),
        )
        name = _named(given.name, held.content_hash)
        self.plugins["data set", OBJECT] = _source_of(replace(held, name=name))
        return name

    def backbone(self, given: str | Network | None) -> str | None:
        """The name of a backbone: ``object:NAME-`` and the beginning of the hash of its code and weights."""
        if given is None or isinstance(given, str):
            return given
        called: type | FunctionType
        if isinstance(given, nn.Module):
            code = digest_of_code({type(one) for one in given.modules()})
            digest = hashlib.sha256(f"{code} {digest_of_weights(given)}".encode()).hexdigest()
            called = type(given)
        elif isinstance(given, type | FunctionType) and given.__name__.isidentifier():
            digest, called = digest_of_code([given]), given
        else:
            raise FedbenchError(
                f"backbone={given!r} is none: give a name, an nn.Module, or a class or function with a name that makes "
                "one without arguments."
            )
        name = _named(called.__name__, digest)
        self.plugins["backbone", OBJECT] = _family_of(given, digest)
        return name

    def settings(self, given: Mapping[str, Any] | None) -> dict[str, Any]:
        """Settings by key, with the names of partitions and metrics in place of classes and objects.

        A partition is called ``object:NAME-`` and the beginning of its code's hash, a metric by its ``name``; behind
        it stand the parameters of an object that are not at their defaults.
        """
        if not isinstance(given, Mapping | None):
            return given  # refused with all other settings
        named = {"partition": self._partition, "scenario.partition": self._partition, "metrics": self._metric}
        return {key: _each(named[key], value) if key in named else value for key, value in (given or {}).items()}

    def _partition(self, given: object) -> object:
        if given is None or isinstance(given, str):
            return given
        cls = _class_of(given, "partition")
        if _is_registered(cls):
            return cls.name + _options(given)
        if cls.location is not None:
            raise FedbenchError(f"partition {cls.usage()!r} reads a location; put it into a file, with plugins=[FILE].")
        made = type(cls.__name__, (cls,), {"name": OBJECT, "location": "NAME", "__doc__": cls.__doc__})
        if self.plugins.setdefault(("partition", OBJECT), made).__base__ is not cls:
            raise FedbenchError("there are two partitions of this program; give one a call.")
        return _named(cls.name, digest_of_code([cls])) + _options(given)

    def _metric(self, given: object) -> object:
        if given is None or isinstance(given, str):
            return given
        cls = _class_of(given, "metric")
        if not _is_registered(cls) and self.plugins.setdefault(("metric", cls.name), cls) is not cls:
            raise FedbenchError(f"two metrics are called {cls.name!r}; give one another name.")
        return cls.name + _options(given)

    def _method(self, cls: object) -> str:
        if not isinstance(cls, type):
            raise FedbenchError(
                f"{cls!r} is no method; give its name, a class that is derived from fedbench.api.Method, or a RunSpec."
            )
        where = f"{cls.__module__}.{cls.__qualname__}"
        check_method(cls, where)
        method: type[AnyMethod] = cls
        if method.name not in method_names():
            if self.plugins.setdefault(("method", method.name), cls) is not cls:
                raise FedbenchError(f"two classes are called {method.name!r}; give one another name.")
        elif find_method(method.name) is not cls:
            raise FedbenchError(f"{where} calls itself {method.name!r}, as an installed method; give it another name.")
        return method.name


def _each(named: Callable[[object], object], given: object) -> object:
    """Each of one value or several."""
    return list(map(named, given)) if isinstance(given, list | tuple) else named(given)


def _class_of(given: object, kind: str) -> type[AnyPlugin]:
    """The plug-in class that is given, by itself or as one of its objects. FedbenchError for anything else."""
    cls = given if isinstance(given, type) else type(given)
    check_plugin(cls, kind, f"{cls.__module__}.{cls.__qualname__}")
    return cast(type[AnyPlugin], cls)


def _is_registered(cls: type[AnyPlugin]) -> bool:
    found = registered(cls.kind).get(cls.name)
    return found is not None and found.load() is cls


def _options(given: object) -> str:
    """The parameters of a plug-in that are not at their defaults, as they are typed: ``?ratio=0.8``; "" of a class."""
    if isinstance(given, type):
        return ""
    params, usual = cast(AnyPlugin, given).params, type(cast(AnyPlugin, given)).Params()
    values = {name: getattr(params, name) for name in declared(type(usual))}
    changed = [f"{name}={value}" for name, value in values.items() if value != getattr(usual, name)]
    return f"?{'&'.join(changed)}" if changed else ""


def _named(given: str, digest: str) -> str:
    return f"{OBJECT}:{re.sub(r'[^A-Za-z0-9_.-]+', '-', given).strip('-') or 'data'}-{digest[:_DIGITS]}"


def _source_of(held: Dataset) -> type:
    class OwnDataset(DatasetSource[NoParams]):
        """A data set of this program."""

        name = OBJECT
        location = "NAME"

        def load(self, request: DatasetRequest) -> Dataset:
            """It is there already."""
            return held

    return OwnDataset


def _family_of(given: Network, digest: str) -> type:
    class OwnBackbone(BackboneFamily[NoParams]):
        """A backbone of this program."""

        name = OBJECT
        location = "NAME"

        def load(self, request: BackboneRequest) -> Backbone:
            """A copy of the network, or one made from the run's seed."""
            module = copy.deepcopy(given) if isinstance(given, nn.Module) else given()
            network = image_network(request.text, module, _width_of(module, request))
            return replace(network, weights_hash=digest)

    return OwnBackbone


def _width_of(module: object, request: BackboneRequest) -> int:
    """The width of the features that the network gives of images. FedbenchError where it gives none."""
    if not isinstance(module, nn.Module):
        raise FedbenchError(f"backbone {request.text!r} made a {type(module).__name__}; make an nn.Module.")
    height, width = request.image_size or (_SIDE, _SIDE)
    was_training = module.training
    module.eval()
    try:
        with torch.no_grad():
            features = module(torch.zeros(2, 3, height, width))
    except Exception as error:
        raise FedbenchError(
            f"backbone {request.text!r} can't read images (b, 3, {height}, {width}): {reason_of(error)}"
        ) from error
    finally:
        module.train(was_training)
    if not isinstance(features, Tensor) or features.ndim != 2 or len(features) != 2:
        shape = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise FedbenchError(
            f"backbone {request.text!r} gives {shape} of 2 images; it must give features (b, d), without a classifier."
        )
    return int(features.shape[1])
