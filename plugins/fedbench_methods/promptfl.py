"""PromptFL - Guo, Guo, Wang, Tang, Xu, "PromptFL: Let Federated Participants Cooperatively Learn Prompts Instead of
Models", IEEE TMC 23(5), 2024; arXiv 2208.11625. Its local model is CoOp (Zhou et al., IJCV 2022).

Only M context vectors v ∈ R^{M×d_t} in front of every class name are trained and sent; CLIP is frozen:
    t_k = g([v; name_k]) / |·|,   f_x = f(x) / |·|,   L = CE(s f_x·t_k, y)           (s: CLIP's own scale, frozen)
    v ← Σ_i (n_i / Σ_j n_j) v_i

Answers: build_model. Everything else is FedAvg; stacks with methods that add loss terms or aggregate otherwise.
Paper against released code: the code averages without n_i (`weighting=uniform` of the run), and over one aliased
state that the last client overwrote; the definition is what runs here. Its recipe (SGD 1e-3, cosine, one warm-up epoch)
goes over epochs; the run's `lr_schedule` goes over rounds. The recipe here is that of FLiP's re-implementation
(SGD 2e-3, momentum 0.9, decay 1e-4); in runs of few rounds prompts hardly move at such rates, so tune lr up to 0.5.
Names are written "<context> name." with the period of the CoOp family; `init=words` starts at "a photo of a name.". The
run's `templates` are not read: the context stands in their place.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedbench.api import Method, Model, ModelSetup, hookimpl, hyper
from fedbench.models.heads import clip_of, text_classifier
from fedbench.models.prompts.context import Init, Position, initial_context, prompt_tower


@dataclass(frozen=True, kw_only=True)
class PromptFlParams:
    """Hyper-parameters of PromptFL."""

    context_length: int = hyper(
        16,
        symbol="M",
        low=1,
        high=64,
        search=(1, 16),
        when={"init": ("random",)},
        source="released code; init=words has 4, the tokens of 'a photo of a'",
    )
    position: Position = hyper("end", symbol="position", source="of the class name; released code: end")
    init: Init = hyper("random", symbol="v⁰", source="released code: N(0, 0.02²)")
    per_class: bool = hyper(False, symbol="CSC", source="a context a class, K M d_t floats; released code: off")


class PromptFL(Method[PromptFlParams]):
    """A learnable context before the class names."""

    name = "promptfl"
    citation = "Guo et al., PromptFL: Let Federated Participants Cooperatively Learn Prompts, TMC 2024"
    requires = ("clip", "context")
    recipe = {"optimizer": "sgd", "lr": 2e-3, "momentum": 0.9, "weight_decay": 1e-4}

    @hookimpl
    def build_model(self, setup: ModelSetup) -> Model:
        """The context as only weight; logits are scaled cosines of the frozen image features to its texts."""
        clip, params = clip_of(setup), self.params
        classes = len(setup.classnames) if params.per_class else None
        context = initial_context(clip, setup.spec.seed, params.context_length, params.init, classes=classes)
        tower = prompt_tower(clip, setup.classnames, context.shape[-2], params.position)

        forward = text_classifier(lambda tensors: tower.encode(tensors["prompt.context"]), clip.logit_scale)
        return Model(weights={"prompt.context": context}, forward=forward, encoder=clip.image_encoder())
