"""Values at which a method adds nothing: then a stack equals the one without it, to the bit."""

import pytest
import torch

from fedbench.rounds.loop import evaluate
from fedbench.testing import digest, final_state
from tests.equations.kit import CLIP, LORA, RESNET, end_of, few, played, run_of, spec_of

ALONE = {"executor": "sequential"}
"""Where a cohort that trains at once has FedAvg's own gradients in closed form, which rounds otherwise."""
BOTH = (CLIP, "convnet")
EVERYONE = {"scenario": {"participation": 1.0}}


def limit(stack, off, plain="fedavg", plain_params=None, on=None, backbones=("",), **settings):
    """At ``off`` it is ``plain``; at ``on`` it is not, where that is given."""
    return [
        pytest.param(stack, off, plain, plain_params, on, {**settings, "backbone": each}, id=f"{stack}-{each}")
        for each in backbones
    ]


def kgcoop(init, **params):
    return {"init": init, "context_length": 4, **params}


TRAINED = {"rounds": 2, "lr": 0.05, "momentum": 0.9, "weight_decay": 5e-4}
PROGRAD = {"backbones": (CLIP,), "lr": 0.05, "momentum": 0.9, "weight_decay": 1e-4, **ALONE}
ONE_BATCH = {"batch_size": 1000, "local_epochs": 3, "rounds": 2}
PROJECTOR = ("convnet?projector=8&projector_layers=2",)

LIMITS = [
    *limit("centralized", {}, "clip-linear-centralized", rounds=2),
    *(
        each
        for other in ("fedavgm", "promptfl", "ditto")
        for each in limit(
            f"climb+{other}", {"climb": {"dual_lr": 0.0}}, other,
            on={"climb": {"tolerance": 0.0, "dual_lr": 20.0}}, rounds=3,
        )
    ),
    *limit("clip2fl", few("clip2fl", beta=0.0), on=few("clip2fl"), backbones=(CLIP,), rounds=2),
    *limit("fed-focal", {"fed-focal": {"gamma": 0.0}}, backbones=BOTH, rounds=2, **ALONE),
    # a client has own weights to begin with when it takes part again
    *limit("fedala", {}, rounds=1, **ALONE),
    *(
        each
        for form in ("accumulating", "ema", "nesterov")
        for each in limit(
            "fedavgm", {"fedavgm": {"beta": 0.0, "server_lr": 1.0, "form": form}},
            on={}, backbones=(CLIP, RESNET), rounds=2,
        )
    ),
    *limit("fedawa", {"fedawa": {"steps": 0}}, on={}, rounds=2),
    *limit("fedbe", {"fedbe": {"steps": 0, "samples": 2}}, backbones=(CLIP, RESNET), rounds=1),
    *limit("feddecorr", {"feddecorr": {"beta": 0.0}}, on={}, backbones=("convnet",), rounds=1),
    *limit("feddf", {"feddf": {"steps": 0}}, backbones=("convnet",), rounds=2, plain_weighting="uniform"),
    *limit("feddg-ga", {"feddg-ga": {"step": 0.0}}, rounds=2, plain_weighting="uniform"),
    *limit("feddisco", {"feddisco": {"a": 0.0, "b": 0.0}}, on={}, rounds=2),
    *limit("fedfa+fedprox", {"fedprox": {"mu": 0.0}}, "fedfa", backbones=(RESNET,), rounds=2, weighting="uniform"),
    *(
        each
        # four rounds, in which every client takes part more than once
        for other in ("fedprox", "moon")
        for each in limit(
            f"fedglcl+{other}", {other: {"mu": 0.0}}, "fedglcl", on={other: {"mu": 1.0}}, backbones=(CLIP,), rounds=4
        )
    ),
    *limit("fedlc", {"fedlc": {"tau": 0.0}}, backbones=BOTH, rounds=2, **ALONE),
    *limit("dp", {"dp": {"clip": 0.0}}, on={"dp": {"clip": 0.01, "epsilon": 0.0, "noise": 0.0}}, rounds=2),
    *limit("geometric-median", {"geometric-median": {"steps": 0}}, on={}, backbones=(CLIP, RESNET), rounds=2),
    *limit("krum", {"krum": {"attackers": 0.0, "selected": 0}}, on={"krum": {"attackers": 0.0}}, rounds=2, **EVERYONE),
    *limit("norm-bound", {"norm-bound": {"bound": 0.0}}, on={"norm-bound": {"bound": 0.01}}, rounds=2),
    *limit("norm-bound", {"norm-bound": {"bound": 1e4}}, backbones=(CLIP, RESNET), rounds=2),
    *limit("topk", {"topk": {"share": 1.0}}, on={}, backbones=(CLIP, RESNET), rounds=2),
    *limit("trimmed-mean", {"trimmed-mean": {"trim": 0.0}}, on={"trimmed-mean": {"trim": 0.4}}, rounds=2, **EVERYONE),
    *limit(
        "fedloge+fedprox", {"fedloge": {"steps": 20}, "fedprox": {"mu": 0.0, "form": "squared"}},
        "fedloge", {"fedloge": {"steps": 20}}, backbones=("convnet",), rounds=1,
    ),
    # one batch an epoch; the clients' sizes differ, and so do their shares
    *limit("fednova", {}, momentum=0.0, **ONE_BATCH),
    *limit("fednova", {}, momentum=0.9, **ONE_BATCH),
    *limit("fedntd", {"fedntd": {"beta": 0.0, "tau": 3.0}}, backbones=BOTH, rounds=2),
    *limit("fedavg+fedrs", {"fedrs": {"alpha": 1.0}}, on={}, backbones=(CLIP,), rounds=2, **ALONE),
    *limit("promptfl+fedrs", {"fedrs": {"alpha": 1.0}}, "promptfl", on={}, backbones=(CLIP,), rounds=2, **ALONE),
    *limit("fedsam", {"fedsam": {"rho": 0.0}}, on={}, backbones=(RESNET,), rounds=2),
    *limit("fedasam", {"fedasam": {"rho": 0.0}}, on={}, backbones=(RESNET,), rounds=2),
    *limit(
        "feduv", {"feduv": {"uniformity": 0.0, "variance": 0.0}},
        on={"feduv": {"uniformity": 0.0}}, backbones=(CLIP,), rounds=1, **ALONE,
    ),
    *limit(
        "clip-lora+flexlora", {"clip-lora": LORA, "flexlora": {"split": "root"}},
        "clip-lora", {"clip-lora": {**LORA, "lora_agg": "product_svd"}},
        on={"clip-lora": LORA}, rounds=2, lr=5e-3, **ALONE,
    ),
    *limit("fpl", {"fpl": {"lam": 0.0}}, on={}, backbones=("convnet",), rounds=2, **ALONE),
    *limit("fpl", {}, backbones=("convnet",), rounds=1, **ALONE),
    *limit("in-turn", {}, backbones=(CLIP,), rounds=3, scenario={"participation": 0.25}, **ALONE),
    *(
        each
        for init, executor in (("words", "cohort"), ("random", "sequential"))
        for each in limit(
            "kgcoop", {"kgcoop": kgcoop(init, weight=0.0)}, "promptfl", {"promptfl": kgcoop(init)},
            on={"kgcoop": kgcoop(init)}, executor=executor, **TRAINED,
        )
    ),
    *limit(
        "logit-adjustment", {"logit-adjustment": {"tau": 0.0}},
        on={"logit-adjustment": {"tau": 1.0}}, backbones=(CLIP,), rounds=2, **ALONE,
    ),
    *limit(
        "promptfl+logit-adjustment", {"logit-adjustment": {"tau": 0.0}}, "promptfl",
        on={"logit-adjustment": {"tau": 1.0}}, backbones=(CLIP,), rounds=2, **ALONE,
    ),
    # which it needs features for that are trained, where it does something
    *limit("moon", {"moon": {"mu": 0.0}}, backbones=(CLIP,), rounds=1, **ALONE),
    *limit("moon", {"moon": {"mu": 0.0}}, on={"moon": {"mu": 5.0}}, backbones=PROJECTOR),
    *limit("promptfl+prograd", {"prograd": {"strength": 0.0}}, "promptfl", on={}, **PROGRAD),
    *limit("ratio-loss", {"ratio-loss": {"beta": 0.0}}, on={}, backbones=BOTH, rounds=2, **ALONE),
    *limit("ratio-loss", {"ratio-loss": {"beta": 0.0, "normalise": False}}, backbones=BOTH, rounds=2, **ALONE),
]  # fmt: skip


@pytest.mark.parametrize(("stack", "off", "plain", "plain_params", "on", "settings"), LIMITS)
def test_at_its_limit_a_stack_is_the_one_without_it_bit_for_bit(stack, off, plain, plain_params, on, settings):
    own = {"weighting": settings.pop("plain_weighting")} if "plain_weighting" in settings else {}
    ours = run_of(stack, off, **settings)
    # of the stack's own scenario, which may have samples at the server
    same = {**settings, "backbone": ours.spec.backbone, "scenario": dict(ours.spec.scenario), **own}
    wanted = digest(end_of(plain, plain_params, **same))
    assert digest(final_state(ours)) == wanted
    assert on is None or digest(end_of(stack, on, **settings)) != wanted


@pytest.mark.parametrize(
    ("one", "other", "settings"),
    [
        ("fedavgm", "fedawa+fedavgm", {"rounds": 2}),
        ("fedadam", "feddisco+fedadam", {"rounds": 2}),
        ("feddyn", "feddyn+feddisco", {"rounds": 2}),
        ("local", "local+fed-focal", {"rounds": 2}),
        *(("fedavg", each, {"backbone": CLIP, "rounds": 1, **ALONE}) for each in ("fed-focal", "fedlc")),
        ("fednova", "fedavg", {**ONE_BATCH, "batch_size": 8, "momentum": 0.0}),
        ("fednova", "fedavg", {**ONE_BATCH, "batch_size": 8, "momentum": 0.9}),
        ("in-turn", "fedavg", {"backbone": CLIP, "rounds": 3, **ALONE}),
        *((each, f"fedsam+{each}", {"rounds": 2, **ALONE}) for each in ("ditto", "fedprox", "promptfl")),
    ],
)
def test_a_method_changes_what_is_trained(one, other, settings):
    assert digest(end_of(one, **settings)) != digest(end_of(other, **settings))


def quiet(method, backbone=CLIP, **params):
    return pytest.param(method, few(method, **params), backbone, id=f"{method}-{backbone}")


@pytest.mark.parametrize(
    ("method", "params", "backbone"),
    [
        quiet("ccvr", virtual_features=0),
        quiet("ccvr", epochs=0),
        quiet("ccvr", epochs=0, head_start="fresh"),
        *(quiet("rucr", backbone, loss_weight=0.0, rectify_rounds=0) for backbone in BOTH),
    ],
)
def test_without_its_head_a_method_is_fedavg_in_weights_predictions_and_bytes(method, params, backbone):
    _, ours = played(spec_of(method, params, backbone=backbone, rounds=2))
    _, plain = played(spec_of("fedavg", backbone=backbone, rounds=2))
    for (mine, record, predicted), (theirs, its_record, its_predicted) in zip(ours, plain, strict=True):
        assert digest(mine) == digest(theirs) and torch.equal(predicted.labels, its_predicted.labels)
        assert (record.bytes_up, record.bytes_down) == (its_record.bytes_up, its_record.bytes_down)
    assert "ccvr" not in ours[-1][0].server


@pytest.mark.parametrize(
    ("method", "params", "weighting", "backbone"),
    [
        # without batch norm; FedBN weighs clients by an option of its own, FedAvg by the run's
        *(("fedbn", {}, "uniform", backbone) for backbone in BOTH),
        *(("fedbn", {"weighting": "samples"}, "samples", backbone) for backbone in BOTH),
        *(("fedproto", {"lam": 0.0, "aggregate_weights": True}, None, backbone) for backbone in BOTH),
    ],
)
def test_where_nothing_is_private_a_personalisation_is_fedavg_bit_for_bit(method, params, weighting, backbone):
    settings = {} if weighting is None else {"weighting": weighting}
    ours = run_of(method, {method: params}, backbone=backbone, rounds=2)
    plain = run_of("fedavg", backbone=backbone, rounds=2, **settings)
    one, other = final_state(ours), final_state(plain)
    assert digest(one) == digest(other) and not one.own
    assert evaluate(ours, one)[0] == evaluate(plain, other)[0]


@pytest.mark.parametrize(
    ("learner", "stack", "settings"),
    [
        *((each, f"{each}+ditto", {"rounds": 3}) for each in ("fedavg", "promptfl", "fedclip")),
        *((each, f"{each}+apfl", {"backbone": CLIP, "rounds": 2}) for each in ("fedavg", "promptfl")),
        ("fedsam", "fedsam+ditto", {"rounds": 2}),
    ],
)
def test_beside_own_models_the_global_one_is_trained_as_without_them_bit_for_bit(learner, stack, settings):
    plain = end_of(learner, **settings, **ALONE)
    run = run_of(stack, **settings, **ALONE)
    beside = final_state(run)
    assert plain.weights
    assert all(torch.equal(value, beside.weights[name]) for name, value in plain.weights.items())
    assert run.info.round_bytes == sum(4 * value.numel() for value in plain.weights.values()), "nothing more is sent"
    assert evaluate(run, beside)[0]["personal_mean_client_accuracy"] >= 0
