"""A scenario: how a data set becomes a federation, as independent choices instead of one code path a paper."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Imbalance = Literal["none", "exponential", "natural"]
GroupRule = Literal["cumulative_exclusive", "cumulative_inclusive", "shots", "clip2fl", "thirds"]


def later(default: Any, **constraints: Any) -> Any:
    """A field added after runs were recorded; it is part of a run's content only if it differs from ``default``.

    The ids of runs without it thus stay the same.
    """
    return Field(default, exclude_if=lambda value: value == default, **constraints)


def later_defaults(model: BaseModel) -> dict[str, Any]:
    """The later fields of ``model`` that have their default, with these values."""
    written = model.model_dump()
    return {
        name: getattr(model, name)
        for name, field in type(model).model_fields.items()
        if field.exclude_if and name not in written
    }


LABEL_FLIP = "label_flip"


class Scenario(BaseModel):
    """Class imbalance, partition, visibility of labels and participation. Fields a choice doesn't use are ignored."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    imbalance: Imbalance = Field(
        default="none",
        description="long tail of the training classes: none (as the data are, no groups reported), exponential "
        "(thinned by imbalance_factor), natural (the data's own tail; its own groups if its lists define them)",
    )
    imbalance_factor: float = Field(default=100.0, ge=1, le=1e6, description="largest over smallest class count (IF)")
    imbalance_order: Literal["label", "shuffled"] = Field(
        default="label",
        description="which classes are the big ones: in label order, or in an order drawn from the seed",
    )
    shots: int = later(
        0,
        ge=0,
        le=1_000_000,
        description="training samples that are left of every class, as in few-shot protocols (1, 2, 4, 8, 16), all of "
        "a class that has fewer; those of fewer shots are among those of more. 0: all",
    )
    shots_of: Literal["federation", "client"] = later(
        "federation",
        description="whose samples shots are of: drawn of every class before the partition, or of every class that a "
        "client holds after it",
    )
    partition: str = Field(
        default="iid",
        min_length=1,
        description="how the training samples are partitioned among clients, see `fedbench list partitions`",
    )
    clients: int = Field(
        default=20,
        ge=1,
        le=100_000,
        description="number of clients; partition domain has clients_per_domain for each domain",
    )
    dirichlet_alpha: float = Field(
        default=0.5,
        ge=1e-3,
        le=1e6,
        description="concentration of the Dirichlet draws (α or β in papers); small is skewed",
    )
    dirichlet_scheme: Literal["capped", "uncapped", "clientwise"] = Field(
        default="capped",
        description="capped: by class, full clients get no more (NIID-Bench); uncapped: by class, heavier size skew; "
        "clientwise: by client, equal sizes (Hsu et al. 2019). The same concentration means another skew in each",
    )
    min_client_size: int = Field(
        default=10,
        ge=1,
        le=1_000_000,
        description="dirichlet is drawn again until every client holds this many samples",
    )
    shards_per_client: int = Field(default=2, ge=1, le=100_000, description="shards each client gets (s)")
    shard_scheme: Literal["sorted", "deck"] = Field(
        default="deck",
        description="sorted: shards of the label-sorted data, may straddle classes (McMahan et al. 2017); "
        "deck: shards of one class, so at most s labels a client (FedNTD, FST-CBDG)",
    )
    classes_per_client: int = Field(default=2, ge=1, le=100_000, description="distinct classes each client holds")
    class_scheme: Literal["round_robin", "equal"] = Field(
        default="equal",
        description="round_robin: class i mod C and random others, unequal sizes (NIID-Bench); "
        "equal: every class has as many holders (FedGLCL)",
    )
    equal_sizes: bool = Field(
        default=False,
        description="afterwards lay the clients end to end and cut again into equal slices; not for domain",
    )
    clients_per_domain: int = Field(default=1, ge=1, le=10_000, description="clients that share one domain")
    within_domain: Literal["iid", "dirichlet"] = Field(
        default="iid",
        description="how the clients of a domain share its samples; dirichlet (with dirichlet_alpha, dirichlet_scheme "
        "and min_client_size) puts label skew on top of feature skew",
    )
    holdout_domain: str | None = Field(
        default=None, description="domain no client trains on; all of it is tested (leave-one-domain-out)"
    )
    domain_split: Literal["80/20", "60/20/20"] = Field(
        default="80/20",
        description="train/test or train/validation/test, cut for each domain of data with domains; a data set's own "
        "test split stays as it is unless a domain is held out, and 60/20/20 then takes a quarter of train to validate",
    )
    unseen_classes: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="share of the classes, the last in label order, that are left out of training: no client has a "
        "sample, no method knows the name. Rounded, halves down as in CoOp's base-to-new split; at least one where it "
        "is not 0. Everything else happens to the others as if the data had only them; models that can name classes "
        "are scored on both",
    )
    labels: Literal["visible", "hidden"] = Field(
        default="visible", description="hidden: clients get batches without labels"
    )
    labelled_clients: float = later(
        1.0,
        gt=0,
        le=1,
        description="share of the clients whose samples have labels, one at least; the others train only with a method "
        "that gives labels",
    )
    labelled_samples: float = later(
        1.0,
        gt=0,
        le=1,
        description="share of the samples of each such client that have labels, one at least; the rest is trained on "
        "only with a method that gives labels",
    )
    label_noise: float = later(
        0.0,
        ge=0,
        lt=1,
        description="probability that a client's label is wrong; clients are scored by the right ones, and the "
        "server's own samples have them",
    )
    noise_kind: Literal["symmetric", "pairwise"] = later(
        "symmetric",
        description="what a wrong label is: symmetric: any other class alike; pairwise: the next one in label order",
    )
    noisy_clients: float = later(
        1.0, gt=0, le=1, description="share of the clients with wrong labels; the others' are right"
    )
    noise_rates: Literal["equal", "drawn"] = later(
        "equal",
        description="equal: label_noise at every noisy client; drawn: each has its own rate, uniform from 0 to "
        "label_noise",
    )
    holdout_clients: float = later(
        0.0,
        ge=0,
        lt=1,
        description="share of the clients that never train, one at least where it is not 0; the model is scored on "
        "them as on new ones, with finetune_epochs also after they have trained on alone",
    )
    participation: float = Field(default=1.0, gt=0, le=1, description="fraction of the clients sampled in a round")
    dropout: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="probability that a sampled client fails before it trains: it was sent the model, returns nothing",
    )
    late_dropout: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="probability that a client trains, but its updates of the round never arrive: they are not counted "
        "as sent up, while what the client keeps to itself has changed",
    )
    stragglers: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="probability that a client gets only part of its local steps done and returns that; it counts with "
        "all its samples (FedProx, Li et al. 2020)",
    )
    straggler_work: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="least share of its local steps that a straggler gets done, drawn uniformly from here to 1; one "
        "step at least",
    )
    corrupt: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="probability that what a client sends up in a round is damaged on its way (NaN or infinite values, "
        "a tensor of another shape, one missing): it counts as sent, and the server rejects it",
    )
    attackers: float = later(
        0.0,
        ge=0,
        lt=1,
        description="share of the clients that attack whenever they take part, one at least where it is not 0",
    )
    attack: Literal["label_flip", "sign_flip", "gaussian", "alie"] = later(
        LABEL_FLIP,
        description="what attackers do: label_flip: train on the label C - 1 - y for y; sign_flip: send the change "
        "they trained with the other sign; gaussian: a random change as long; alie: what lies just within the spread "
        "of the others (Baruch et al. 2019)",
    )
    attack_scale: float = later(
        1.0,
        gt=0,
        le=1000,
        description="the change that attackers send is so many times as long; of alie it lies so many deviations from "
        "their mean, 1.5 in its paper; not for label_flip",
    )
    validation: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="share of every class's training samples set aside before classes are thinned, and scored in place "
        "of the test split, which the run then never sees; 0: the test split is scored. What tuning measures on",
    )
    server_samples: int = Field(
        default=0,
        ge=0,
        le=100_000,
        description="training samples of every class that the server has, drawn before classes are thinned; for "
        "methods that need data at the server",
    )
    server_source: Literal["aside", "shared"] = Field(
        default="aside",
        description="aside: no client has the server's samples; shared: they stay in the clients' pool as well (the "
        "released Ratio Loss), so that clients train on what they would without a server's samples; a class that has "
        "fewer gives all",
    )
    server_labels: Literal["visible", "hidden"] = Field(
        default="hidden", description="whether the server's own samples have labels"
    )
    groups: GroupRule = Field(
        default="cumulative_exclusive",
        description="reporting groups of a long tail: cumulative_exclusive (75/95 % of samples, crossing class in the "
        "next group; CAPT), cumulative_inclusive (in the earlier one; FedLoGe), shots (>100, 20..100, <20), "
        "clip2fl (>1500, 200..1500, <200), thirds (first and last 30 % of classes)",
    )
    partition_seed: int | None = Field(
        default=None,
        ge=0,
        le=2**63 - 1,
        description="seed of imbalance, partition and splits; none: the run's seed, and 0 for splits, so that no seed "
        "trains on what another is tested on",
    )

    @property
    def partition_name(self) -> str:
        """The partition without location and options."""
        return self.partition.partition("?")[0].partition(":")[0]

    @property
    def has_faults(self) -> bool:
        """Whether anything may go wrong with a client of a round."""
        return any((self.dropout, self.late_dropout, self.stragglers, self.corrupt))
