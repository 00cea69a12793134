"""FedSpeed - Sun, Shen, Huang, Ding, Tao, "FedSpeed: Larger Local Interval, Less Communication Round, and Higher
Generalization Accuracy", ICLR 2023 (Algorithm 1).

`feddyn`'s pull and drift, and gradients that are partly taken uphill as in `fedsam`. With h_k the sum of all changes
of client k (0 at first; −h_k/λ is the paper's ĝ_k),
    g₁ = ∇F_k(w),    g₂ = ∇F_k(w + ρ g₁ / ‖g₁‖),    w ← w − η ((1 − a) g₁ + a g₂ + (w − x + h_k) / λ),  from x, to y_k
    h_k ← h_k + y_k − x,    x ← Σ_{k∈S} p_k (y_k + h_k)

Wraps: broadcast, local_gradients, aggregate (whose answer is taken of the corrected y_k + h_k, the one vector that a
client sends). Stacks with any method but another server step or correction of drift. A model that a client keeps has
no drift, and climbs by a norm of its own. Clients train one after another. ρ = 0 leaves FedDyn's client. The pull is
not taken uphill, and not in the recorded loss, which is F_k's at w. Bytes are FedAvg's: both sides work h_k out.
Left open / contradicted:
- The released code's server is FedDyn's, the mean of the y_k and of all clients' drifts (`server=all`).
- It calls 1/λ lamb, 0.1, and adds it to the weight decay. In the paper's terms its λ is 10, the default here.
- Its mix is a = 1; its norm of g₁ is 1e-7 larger. It clips at a norm of 10: the recipe. The run's `clip_norm` covers
  the pull too: it clips the mixed gradient and the pull together.
- The mean is plain in both (`weighting`). Running statistics are moved by the second pass only, and averaged.
Cost: twice the local computation; memory as `feddyn`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

import fedbench.api as fb
from fedbench.toolkit.wrapping import Aggregate, Aggregated, Gradients, Send, weights_of, with_weights
from fedbench_methods.shared import dynamic_regularisation as dynamic
from fedbench_methods.shared.ascent import both


@dataclass(frozen=True, kw_only=True)
class FedSpeedParams:
    """Hyper-parameters of FedSpeed."""

    lam: float = fb.hyper(
        10.0, symbol="λ", low=0.1, high=1e4, log=True, search=(1.0, 1000.0), source="released code: 1/λ = 0.1"
    )
    rho: float = fb.hyper(
        0.1, symbol="ρ", low=1e-4, high=10.0, log=True, off=0.0, search=(0.01, 1.0), source="released code: 0.1"
    )
    mix: float = fb.hyper(1.0, symbol="a", low=0.0, high=1.0, needs="rho", source="released code: 1")
    server: Literal["cohort", "all"] = fb.hyper(
        "cohort", symbol="x̂", source="cohort: Alg. 1; all: released code, as FedDyn"
    )
    weighting: dynamic.Weighting = dynamic.weighting_field()


def corrected(mixed: Tensor, weight: Tensor, received: Tensor, drift: Tensor, lam: float) -> Tensor:
    """(1 − a) g₁ + a g₂, ``mixed``, and (w − x + h_k) / λ, all of one shape."""
    return mixed + (weight - received + drift) / lam


class FedSpeed(fb.Method[FedSpeedParams]):
    """Dynamic regularisation with gradients taken uphill."""

    name = "fedspeed"
    citation = "Sun et al., FedSpeed: Larger Local Interval, Less Communication Round, ICLR 2023"
    requires = ("global_model", "sent_start", "own_ascent", "own_updates")
    recipe = {"clip_norm": 10.0}
    prevents = ("plain_steps", "own_ascent")

    @fb.wrapper
    def broadcast(self, task: fb.BroadcastTask, rest: Send) -> fb.Broadcast:
        """What the stack sends; the client holds h_k."""
        return dynamic.with_drift(rest(task), task, task.state.get(self.name, {}))

    @fb.wrapper
    def local_gradients(self, step: fb.LocalStep, rest: Gradients) -> fb.StepGradients:
        """The mixed gradients and the pull of the drift."""
        p = self.params
        if p.rho and p.mix:
            first, second = both(step, rest, p.rho)
            by_name = {n: (1 - p.mix) * first.by_name[n] + p.mix * g for n, g in second.by_name.items()}
        else:
            first = rest(step)
            by_name = dict(first.by_name)
        for name, drift in dynamic.drift_of(step.task.payload).items():
            if name in by_name:
                w, x = step.weights[name].detach(), step.received[name]
                by_name[name] = corrected(by_name[name], w, x, drift, p.lam)
        return replace(first, by_name=by_name)

    @fb.wrapper
    def aggregate(self, task: fb.AggregationTask, rest: Aggregate) -> Aggregated:
        """The mean of what the clients send, corrected by their drifts."""
        kept = dynamic.drifted(task, task.state.get(self.name, {}), task.updates)
        task.state[self.name] = kept
        task = dynamic.weighted_as(task, self.params.weighting)
        if self.params.server == "all":
            answer = rest(task)
            return with_weights(answer, {n: y + kept[dynamic.MEAN + n] for n, y in weights_of(answer).items()})
        updates = tuple(
            replace(u, weights={n: y + kept[f"{u.client}/{n}"] for n, y in u.weights.items()}) for u in task.updates
        )
        return rest(replace(task, updates=updates))
