"""What is recorded of a run in words: tags that say which run it is and what made it, and a note for people."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from fedbench.core.errors import FedbenchError
from fedbench.core.scenario import later_defaults
from fedbench.core.spec import RunSpec
from fedbench.core.wording import counted
from fedbench.plugins.provenance import commit, versions
from fedbench.suites.suite import ADHOC, group_of
from fedbench.tracking.schema import HARNESS, KIND, METHOD_CODE, RUN, SUITE

if TYPE_CHECKING:
    from fedbench.core.records import RunInfo
    from fedbench.plugins.provenance import Codes, RunCode

_Parsed = TypeVar("_Parsed", dict[str, Any], list[Any])

_FACTS = (
    "data_hash",
    "weights_hash",
    "num_clients",
    "cohort_size",
    "num_train",
    "num_test",
    "trainable_parameters",
    "round_bytes",
    "server_data",
    "not_on_unseen",
)
"""Fields of `RunInfo` that are written as tags."""
_NOTED = {
    "global_accuracy": "accuracy",
    "head_accuracy": "head classes",
    "mid_accuracy": "mid classes",
    "tail_accuracy": "tail classes",
    "many_accuracy": "many-shot classes",
    "medium_accuracy": "medium-shot classes",
    "few_accuracy": "few-shot classes",
    "domain_mean_accuracy": "mean over domains",
    "worst_client_accuracy": "worst client",
    "new_accuracy": "unseen classes",
    "personal_mean_client_accuracy": "clients' own models",
}
"""Final metrics in a run's note, and what it calls them."""


@dataclass(frozen=True)
class RunTags:
    """The tags of a recorded run by name; one that was not written is empty."""

    raw: Mapping[str, str]
    """As MLflow has them."""

    def text(self, name: str) -> str:
        return self.raw.get(f"fedbench.{name}", "")

    def number(self, name: str) -> int:
        return int(self.text(name) or 0)

    def parsed(self, name: str, kind: type[_Parsed]) -> _Parsed:
        """The same as JSON of a ``kind``; an empty one where there is none."""
        return kind(json.loads(self.text(name))) if self.text(name) else kind()

    @property
    def run_id(self) -> str:
        return self.text("run_id")

    @property
    def suite_version(self) -> int:
        return self.number("suite_version")

    @property
    def files_hash(self) -> str:
        """Hash of its image files; data of one size have only the hash of the data."""
        return self.text("files_hash") or self.text("data_hash")

    @property
    def harness_hash(self) -> str:
        return self.raw.get(HARNESS, "")

    @cached_property
    def methods(self) -> dict[str, str]:
        return {method["method"]: method["hash"] for method in json.loads(self.raw.get(METHOD_CODE, "[]"))}

    @property
    def versions(self) -> dict[str, str]:
        head = "fedbench.version."
        return {key.removeprefix(head): value for key, value in sorted(self.raw.items()) if key.startswith(head)}


def provenance_tags(suite: str, suite_text: str = "", suite_version: int = 1) -> dict[str, str]:
    """Tags of every run of ``suite`` made here: commit, versions, MLflow's own for them, hash of the suite's text."""
    from fedbench.tracking.recording import COMMIT, SOURCE  # imports MLflow, which who reads tags does without

    made = commit()
    return {
        SUITE: suite,
        "fedbench.commit": made,
        **({"fedbench.suite_hash": hashlib.sha256(suite_text.encode()).hexdigest()} if suite_text else {}),
        "fedbench.suite_version": str(suite_version),
        **{f"fedbench.version.{name}": value for name, value in versions().items()},
        SOURCE: "fedbench",
        **({COMMIT: made} if made else {}),
    }


def code_tags(code: RunCode) -> dict[str, str]:
    """Tags that say which code makes a run."""
    methods = [method.as_json() for method in code.methods]
    return {"fedbench.code_hash": code.hash, HARNESS: code.harness, METHOD_CODE: _json_tag("method_code", methods)}


def command_code_tags(codes: Codes) -> dict[str, str]:
    """Tags that say which code a command has at hand: all of it, the harness, each plugin file."""
    plugins = json.dumps(codes.plugins)
    return {"fedbench.code_hash": codes.everything, HARNESS: codes.harness, "fedbench.plugin_code": plugins}


def info_tags(info: RunInfo) -> dict[str, str]:
    """Tags that say what is known of a run before its first round."""
    facts = {"owners": json.dumps(dict(info.owners)), **{name: str(getattr(info, name)) for name in _FACTS}}
    if info.files_hash:
        facts["files_hash"] = info.files_hash
    if info.resumed_round:
        facts["resumed_round"] = str(info.resumed_round)
    return {f"fedbench.{name}": value for name, value in facts.items()}


def run_tags(spec: RunSpec) -> dict[str, str]:
    """Tags that say which run it is; ``method``, ``backbone``, ``setting``, ``scale`` and ``seed`` are to filter by."""
    filters = {"method": spec.method, "backbone": spec.backbone, "setting": spec.setting, "scale": spec.scale}
    named = {
        "run_id": spec.run_id,
        "row": spec.row,
        "setting": spec.setting,
        "scale": spec.scale,
        "tuning": _tuning_tag(spec.tuning),
        "published": _json_tag("published", spec.published),
    }
    return {
        KIND: RUN,
        **{f"fedbench.{name}": value for name, value in named.items()},
        **{name: value for name, value in filters.items() if value},
        "seed": str(spec.seed),
    }


def group_tags(suite: str, spec: RunSpec) -> dict[str, str]:
    """Tags that say what a run without a suite file is filed under; ``setting`` is to filter by."""
    return {SUITE: (group := group_of(spec)), "setting": group} if suite == ADHOC else {}


def run_note(spec: RunSpec, summary: Mapping[str, float], last_round: int) -> str:
    """One paragraph of Markdown about a finished run: what it is, its final numbers, how to evaluate it again."""
    numbers = [f"{called} **{summary[name]:.1f} %**" for name, called in _NOTED.items() if name in summary]
    again = f"Evaluate its model again: `fedbench evaluate {spec.run_id}`"
    return f"{described_by(spec)} After {counted(last_round, 'round')}: {', '.join(numbers)}. {again}"


def described_by(spec: RunSpec) -> str:
    """The run in one sentence of Markdown."""
    where = f", setting **{spec.setting}**" if spec.setting else ""
    return f"**{spec.row}**{where}, seed {spec.seed}, on `{spec.dataset}`."


def _json_tag(name: str, value: Any) -> str:
    """``value`` as the text of the tag; what MLflow would cut could not be read again, so it is refused."""
    from mlflow.utils.validation import MAX_TAG_VAL_LENGTH

    text = json.dumps(value)
    if len(text) > MAX_TAG_VAL_LENGTH:
        raise FedbenchError(
            f"the tag fedbench.{name} of a run has {len(text)} characters, and MLflow keeps {MAX_TAG_VAL_LENGTH}; "
            f"shorten what the suite gives as {name}."
        )
    return text


def _tuning_tag(tuning: Mapping[str, str]) -> str:
    """What the study spent; without its command where that would make the tag too long."""
    from mlflow.utils.validation import MAX_TAG_VAL_LENGTH

    if len(json.dumps(tuning)) > MAX_TAG_VAL_LENGTH:
        tuning = {name: value for name, value in tuning.items() if name != "command"}
    return _json_tag("tuning", tuning)


def flat_params(spec: RunSpec) -> dict[str, str]:
    """The whole spec as text: ``scenario.*``, ``training.*``, ``METHOD.*``, the rest by name. None is ``none``."""
    content = spec.model_dump(mode="json")
    sections = {"": content, "scenario.": content.pop("scenario"), "training.": content.pop("training")}
    sections |= {f"{method}.": values for method, values in content.pop("params").items()}
    return {f"{head}{name}": _text(value) for head, values in sections.items() for name, value in values.items()}


def _text(value: Any) -> str:
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


_DEFAULT = RunSpec()
DEFAULTS = flat_params(_DEFAULT) | {
    f"{head}{name}": _text(value)
    for head, part in (("", _DEFAULT), ("scenario.", _DEFAULT.scenario), ("training.", _DEFAULT.training))
    for name, value in later_defaults(part).items()
}
"""Every field's default as runs record it, also of fields that they record only where they are not at it."""
