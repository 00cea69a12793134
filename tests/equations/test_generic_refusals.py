"""What a method or stack cannot do: it is refused in one sentence, before anything is trained."""

import pytest
import torch

from fedbench.core.errors import FedbenchError
from fedbench.core.types import Model, Outputs
from tests.equations.kit import CLIP, FEW, LORA, run_of

FACTORS = ("fedex-lora", "ffa-lora", "flexlora", "flora", "rolora", "fedsa-lora")
GLOBAL = ("fedadam", "fedavgm", "fedexp", "feddyn", "feddisco", "fedawa", "creff", "capt", "ccvr", "fed-grab", "fedfa")
GLOBAL += ("scaffold", "fednova", "climb", "feddg-ga")
"""What works on a global model."""
NO_SAMPLES = {"server_samples": 0}


def no(stack, text, params=None, **settings):
    return pytest.param(stack, text, params, settings, id=stack)


REFUSED = [
    # what a method's own values leave undone
    no("capt", "trains nothing", {"capt": {"general_loss": 0.0, "class_loss": 0.0, "main": "off"}}),
    no("capt", "makes a mean in every round", {"capt": {"in_turn": False, "period": 3}}),
    no("capt", "makes a mean in every round", {"capt": {"in_turn": False, "scheduler": "bandit"}}),
    no("capt", r"leave capt\.period out", {"capt": {"scheduler": "bandit", "period": 3}}),
    no("clip-adapter", "reduction", {"clip-adapter": {"reduction": 0}}, backbone=CLIP),
    no(
        "creff",
        "retrain_epochs=0 would leave a new head untrained",
        {"creff": {**FEW["creff"], "retrain_epochs": 0, "head_start": "fresh"}},
        backbone=CLIP,
    ),
    no("fedbe", "fedbe has no teacher", {"fedbe": {"samples": 0, "use_mean": False, "use_clients": False}}),
    no("fedclip", "fedclip has nothing to train", {"fedclip": {"adapters": "none"}}),
    no("fedglcl", "'random' is a draw without weights", {"fedglcl": {"trainable_text": True}}, text_encoder="random"),
    no("fst-cbdg", "fst-cbdg has no loss left", {"fst-cbdg": {"self_training": False, "text_weight": 0.0}}),
    no("pfedmoap", "heads cannot share", {"pfedmoap": {"context_length": 2, "width": 16, "heads": 5}}),
    no("rucr", r"rucr\.left=0\.9 is above rucr\.right=0\.5", {"rucr": {"left": 0.9, "right": 0.5}}),
    *(no(name, "does not fit", {name: {"context_length": 30}}, backbone=CLIP) for name in ("fedotp", "fedpgp")),
    no("promptfl", "does not fit", {"promptfl": {"context_length": 30}}),
    # labels
    no("ccvr", "labels=visible", backbone=CLIP, hidden=True),
    no("fedclip", "needs labels", hidden=True),
    no("fedconcat", "fedconcat needs labels, which this scenario hides", hidden=True),
    no("fedpcl", "fedpcl needs labels", backbone=CLIP, hidden=True),
    no("fedproto", "fedproto needs labels", backbone="convnet", hidden=True),
    no("rucr", "labels=visible", backbone="convnet", hidden=True),
    no("tip-adapter-f", "tip-adapter-f needs labels", backbone=CLIP, hidden=True),
    no("capt", r"one that gives labels \(pseudo-labels\+capt\)", hidden=True),
    no(
        "pseudo-labels+promptfl",
        "pseudo-labels gives clients labels, which they have in this scenario",
        scenario={"labels": "visible"},
    ),
    # samples at the server
    no("capt", "server_samples", {"capt": {"vl_align": False, "scheduler": "bandit"}}),
    no("feddf", "feddf needs unlabelled samples at the server", scenario=NO_SAMPLES),
    no("fedlaw", "labelled samples at the server", scenario=NO_SAMPLES),
    no("ratio-loss", "ratio-loss needs labelled samples", scenario={"server_labels": "hidden"}),
    # backbones: a linear head, features that are trained or known, CLIP, factors
    *(no(name, "backbone", {name: FEW[name]}, backbone=CLIP, tune="full") for name in ("ccvr", "creff", "rucr")),
    no("clip2fl", "backbone", {"clip2fl": FEW["clip2fl"]}, backbone=CLIP, tune="full"),
    no("creff+fedclip", "backbone"),
    no("ratio-loss", "backbone", tune="full"),
    *(no(name, "needs a linear classifier", backbone=CLIP, tune="full") for name in ("fedconcat", "fedetf", "fedloge")),
    no("fedpft+promptfl", "linear classifier"),
    *(
        no("fedfa", r"fedfa augments .* backbone .*; choose a CNN, such as backbone=resnet8", backbone=b, tune=tune)
        for b, tune in ((CLIP, "auto"), (CLIP, "full"), ("convnet", "head"))
    ),
    no("feddecorr", "feddecorr needs features that are trained", backbone=CLIP),
    no("fedproto", r"frozen; choose a backbone", backbone=CLIP),
    no("moon", "frozen; choose a backbone that is trained", backbone=CLIP),
    no("feduv", "feduv needs features that are trained", backbone=CLIP),
    no("fedavg", "features that are trained", method="fpl"),
    no("rucr", "rucr needs features that are trained.*backbone", {"rucr": FEW["rucr"]}, backbone=CLIP),
    no("fedpcl", "needs a pretrained backbone, and 'convnet' starts at random", backbone="convnet"),
    no("fedpcl", "does not read tune=full", backbone=CLIP, tune="full"),
    no("prograd", "prograd needs a CLIP backbone", backbone="convnet"),
    *(no("fedavg", rf"^{each} needs low-rank factors .*clip-lora\+{each}", method=each) for each in FACTORS),
    no(
        "promptfl",
        r"^fedsa-lora needs low-rank factors .*clip-lora\+fedsa-lora",
        method="promptfl+fedsa-lora",
    ),
    *(no(name, "needs a model of more layers", backbone=CLIP) for name in ("fedper", "lg-fedavg", "fedrep")),
    # optimisers
    no("dp-fpl", "dp-fpl needs clients whose update is a weighted sum of gradients", backbone=CLIP, optimizer="adam"),
    *(no(name, f"{name} needs .* set optimizer=sgd", optimizer="adam") for name in ("fednova", "scaffold")),
    # methods that need another thing of the same run
    *(no(f"centralized+{own}", "pools the clients") for own in ("ditto", "local")),
    *(no(f"{name}+ditto", "both a personalisation", backbone="convnet") for name in ("fedper", "lg-fedavg", "fedrep")),
    *(no(f"{name}+ditto", "both a personalisation", backbone=CLIP) for name in ("dp-fpl", "fedpha", "promptfolio")),
    no("fedpurel+ditto", "fedpurel", backbone=CLIP),
    no("feddisco+fedawa", "fedawa and feddisco both answer the hook aggregate"),
    no("proda+fed-focal", "both answer the hook local_loss", backbone=CLIP),
    no("fedlaw+local", "whole models at the server"),
    *(
        no(f"clip-lora+{stack}", "server step|whole models|samples they report", {"clip-lora": LORA})
        for stack in ("fedex-lora+fedavgm", "fedex-lora+flora", "fedex-lora+fedsa-lora")
    ),
    *(no(f"clip-lora+flora+{other}", "server step|whole models") for other in ("fedavgm", "fedsa-lora")),
    no("clip-lora+flexlora+fedsa-lora", "whole models"),
    no("clip-lora+fedsa-lora", "lora_agg=factors", {"clip-lora": {**LORA, "lora_agg": "freeze_A"}}),
    *(
        no(f"in-turn+{other}", f"{other} needs clients that train on from the one model", backbone=CLIP)
        for other in ("scaffold", "feddyn")
    ),
    no("climb+in-turn", "climb needs a mean of clients by the samples they report", backbone=CLIP),
    *(
        no(f"local+{other}", f"{other} needs clients that minimise .*, which local prevents", backbone="convnet")
        for other in ("fedprox", "moon", "fedbabu")
    ),
    no("local+ditto", "which local prevents"),
    *(
        no(f"local+{other}", f"{other} (works on the|needs)", backbone="convnet" if other == "fedfa" else "")
        for other in GLOBAL
    ),
    no("logit-adjustment+pfedme", "logit-adjustment needs", backbone=CLIP),
]


@pytest.mark.parametrize(("stack", "text", "params", "settings"), REFUSED)
def test_what_cannot_be_done_is_refused_before_training(stack, text, params, settings):
    with pytest.raises(FedbenchError, match=text) as error:
        run_of(stack, params, **settings)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("method", ["fed-focal", "fed-grab", "fedlc"])
def test_a_loss_of_labels_refuses_hidden_ones_itself(make_step, method):
    model = Model(weights={"w": torch.zeros(1)}, forward=lambda *_: None)
    outputs = Outputs(torch.zeros(1, 2), torch.zeros(1, 2))
    step = make_step(model, torch.zeros(1, 2), None, outputs=outputs, method=method)
    with pytest.raises(FedbenchError, match="needs labels"):
        step.task.hooks.local_loss(step=step)
