"""FFA-LoRA - Sun, Li, Li, Ding, "Improving LoRA in Privacy-preserving Federated Learning", ICLR 2024; arXiv 2403.12313.

Of every low-rank addition γ B A the factor A stays as it was drawn, alike for all from the run's seed; B alone is
trained, sent and averaged. So the mean of the additions is the addition of the mean, exactly:
    Σ_i p_i B_i A = (Σ_i p_i B_i) A

Wraps: build_model (A becomes a constant). Stacks on a learner with such factors (clip-lora+ffa-lora), of which it knows
the names `*.A` and `*.B`, and with whatever changes losses, the server's step or the models of clients. r w floats a
projection are sent, half of CLIP-LoRA's. clip-lora.lora_agg=freeze_A is the same, bit for bit, as an option.
Left open / contradicted: the paper tunes α and the learning rate anew, since half of the parameters are gone; they are
the learner's and the run's. In one released baseline under this name the loop that is to freeze A runs before the
factors are made, so that A is trained by clients and thrown away: another method, not offered.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

import fedbench.api as fb
from fedbench.toolkit.low_rank import pairs_of
from fedbench.toolkit.wrapping import Build


class FFALoRA(fb.Method[fb.NoParams]):
    """Freezes A of every low-rank addition."""

    name = "ffa-lora"
    citation = "Sun et al., Improving LoRA in Privacy-preserving Federated Learning, ICLR 2024"
    role = "aggregation"
    needs_learner = "clip-lora"

    @fb.wrapper
    def build_model(self, setup: fb.ModelSetup, rest: Build) -> fb.Model:
        """The learner's model with every A among its constants. Raises Unworkable for one without such factors."""
        model = rest(setup)
        frozen = {f"{name}.A" for name in pairs_of(model.weights, self.name)}
        constants = {name: model.weights[name].to(setup.spec.device) for name in sorted(frozen)}

        def forward(tensors: fb.Tensors, inputs: Tensor, training: bool) -> fb.Outputs:
            return model.forward({**constants, **tensors}, inputs, training)

        return replace(
            model,
            weights={name: value for name, value in model.weights.items() if name not in frozen},
            forward=forward,
            constants={**model.constants, **constants},
            lr_factors={name: factor for name, factor in model.lr_factors.items() if name not in frozen},
        )
