"""Runs of CLIP-LoRA with factors in the small text tower alone, and what their server's step should give."""

from fedbench.testing import tiny_spec
from fedbench.toolkit.fedavg import participant_shares


def lora_spec(stack, params=None, others=None, **training):
    """``params`` are clip-lora's, ``others`` those of further methods by name."""
    lora = {"encoders": "text", "dropout": 0.0, **(params or {})}
    training = {"rounds": 2, "lr": 5e-3, **training}
    return tiny_spec(stack, **training).model_copy(update={"params": {"clip-lora": lora, **(others or {})}})


def pairs(run):
    """The names of the run's pairs of factors."""
    return sorted(name.removesuffix(".A") for name in run.model.weights if name.endswith(".A"))


def exact_mean(updates, name):
    """The mean of the products B A, weighted by samples."""
    shares = participant_shares(updates, "samples").tolist()
    return sum(p * u.weights[f"{name}.B"] @ u.weights[f"{name}.A"] for p, u in zip(shares, updates, strict=True))
