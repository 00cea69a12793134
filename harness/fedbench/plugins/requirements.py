"""What methods require of a run (``requires``): each requirement is refused here, in one sentence, once it is known."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch

from fedbench.core.errors import FedbenchError
from fedbench.core.federation import Federation
from fedbench.core.method.base import REQUIREMENTS, declares
from fedbench.core.spec import RunSpec
from fedbench.core.types import NO_LINEAR_HEAD, Backbone, InputSource, Model
from fedbench.kinds.registry import find_method
from fedbench.models.clip.backbone import ClipBackbone
from fedbench.models.clip.image_towers import CAPABILITIES, lacking
from fedbench.models.names import is_dual_encoder, is_pretrained

GRANTED_SERVER_DATA = {"server_data": "unlabelled", "server_labels": "labelled"}
"""What a method that requires it reads of the server's samples."""


def required_by(stack: Sequence[str], plugin_files: Sequence[Path] = ()) -> dict[str, str]:
    """Requirement -> the method of ``stack`` that declares it."""
    by_method = {method: declares(find_method(method, plugin_files), "requires") for method in stack}
    return {name: method for method, names in by_method.items() for name in sorted(names)}


def refuse_settings(requires: Mapping[str, str], spec: RunSpec, provides: Mapping[str, str] | None = None) -> None:
    """FedbenchError where the spec does not grant what methods require: requirement -> method.

    ``provides`` what other methods of the stack meet, which must have a use.
    """
    scenario, provided = spec.scenario, provides or {}
    is_partly = min(scenario.labelled_clients, scenario.labelled_samples) < 1
    if "labels" in provided and scenario.labels == "visible" and not is_partly:
        raise FedbenchError(
            f"{provided['labels']} gives clients labels, which they have in this scenario (labels=visible); set "
            f"scenario.labels=hidden (or labelled_samples below 1), or leave {provided['labels']} out."
        )
    if "labels" in requires and scenario.labels == "hidden" and "labels" not in provided:
        raise FedbenchError(
            f"{requires['labels']} needs labels, which this scenario hides (labels=hidden); set "
            "scenario.labels=visible, choose a method that learns without them, or stack it with one that gives labels "
            f"(pseudo-labels+{spec.method})."
        )
    if "sgd" in requires and spec.training.optimizer != "sgd":
        raise FedbenchError(
            f"{requires['sgd']} needs clients whose update is a weighted sum of gradients, which "
            f"{spec.training.optimizer}'s is not; set optimizer=sgd."
        )
    for name, kind in GRANTED_SERVER_DATA.items():
        labels = " and scenario.server_labels=visible" if name == "server_labels" else ""
        if name in requires and (not scenario.server_samples or (labels and scenario.server_labels == "hidden")):
            raise FedbenchError(
                f"{requires[name]} needs {kind} samples at the server, which this scenario does not grant; set "
                f"scenario.server_samples (per class){labels}, for all methods it is compared with."
            )


def refuse_backbone(requires: Mapping[str, str], spec: RunSpec) -> None:
    """FedbenchError where the backbone is not CLIP, or not pretrained, and a method requires it."""
    if "clip" in requires and not is_dual_encoder(spec.backbone):
        raise FedbenchError(
            f"{requires['clip']} needs a CLIP backbone, not {spec.backbone!r}; use --set backbone=clip:embedded."
        )
    if "pretrained" in requires and not is_pretrained(spec.backbone):
        raise FedbenchError(
            f"{requires['pretrained']} needs a pretrained backbone, and {spec.backbone!r} starts at random; use --set "
            "backbone=clip:embedded, or weights= where the network takes it."
        )


def refuse_drift(requires: Mapping[str, str], federation: Federation) -> None:
    """FedbenchError where clients' data drift, and a method keeps something about each of their samples."""
    if federation.later and "same_samples" in requires:
        raise FedbenchError(
            f"{requires['same_samples']} keeps something about every sample of a client from round to round, and this "
            "partition gives clients other samples in the course of the run; choose one without drift."
        )


def refuse_towers(requires: Mapping[str, str], backbone: Backbone) -> None:
    """FedbenchError where the towers of a dual encoder lack what methods require of them."""
    if not isinstance(backbone, ClipBackbone) or requires.keys().isdisjoint(CAPABILITIES):
        return
    for name, reason in lacking(backbone.module).items():
        if name in requires:
            raise FedbenchError(
                f"{requires[name]} needs {REQUIREMENTS[name]} ({name}), and backbone {backbone.name!r} has none: "
                f"{reason}; use another, such as clip:embedded."
            )


def refuse_model(
    requires: Mapping[str, str], model: Model, private: Collection[str], inputs: InputSource, device: torch.device
) -> None:
    """FedbenchError where the assembled ``model``, or what of it is ``private``, is not what methods require."""
    if "linear_head" in requires and model.head is None:
        raise FedbenchError(f"{requires['linear_head']} needs a linear classifier; {NO_LINEAR_HEAD}.")
    if "trained_features" in requires and not features_are_trained(model, inputs, device):
        method = requires["trained_features"]
        raise FedbenchError(
            f"{method} needs features that are trained, and those of this model are frozen; choose a backbone that is "
            f"trained (a CNN, or tune=full), or stack it with a method that trains a projector (fedglcl+{method})."
        )
    if "sent_head" in requires and model.head is not None and not set(private).isdisjoint(model.head.names):
        raise FedbenchError(
            f"{requires['sent_head']} needs a linear classifier that clients send, and here they keep it; run it "
            "without the method that keeps it private."
        )
    kept, sent = set(private) - model.own, model.weights.keys() - set(private)
    method = requires.get("global_model", requires.get("sent_weights", ""))
    if method and kept and not sent:
        raise FedbenchError(
            f"{method} works on the model that clients send, and here every weight stays with its client; run the two "
            "as separate rows."
        )
    if "whole_model" in requires and kept:
        raise FedbenchError(
            f"{requires['whole_model']} needs the clients' whole models at the server, and {min(kept)!r} never "
            "leaves a client; run it without a method that keeps tensors private."
        )


def features_are_trained(model: Model, inputs: InputSource, device: torch.device) -> bool:
    """Whether the features that ``model`` gives of ``inputs`` depend on its weights."""
    weights = {name: value.detach().clone().to(device).requires_grad_() for name, value in model.weights.items()}
    buffers = {name: value.clone().to(device) for name, value in model.buffers.items()}
    features = model.forward({**weights, **buffers}, inputs.read(torch.arange(1)), False).features
    return features.requires_grad
