"""How many of the papers' printed facts a suite's runs are joined to, and how many a table then shows.

    python -m tests.leaderboard.published_counts

Every run at paper scale gets invented numbers of every metric; the tables are the ones that users see.
"""

from collections import Counter
from collections.abc import Mapping

import pandas as pd

from fedbench.core.metric_names import ACCURACIES, DOMAINS, SELECTED_DOMAINS
from fedbench.core.records import RunInfo
from fedbench.core.spec import RunSpec
from fedbench.suites.expand import expand
from fedbench.suites.resolve import Overrides
from fedbench.suites.suite import load_suite
from fedbench.tracking.schema import FINAL, StoredData, StoredInfo, StoredRun
from fedbench.tracking.tags import flat_params, info_tags, run_tags
from fedbench_boards.leaderboard.board import of_suite, with_means
from fedbench_boards.leaderboard.published import _keys, _metrics, _picked, published_folder, published_of
from fedbench_boards.leaderboard.results import _line
from fedbench_boards.leaderboard.tables import TextTable, text_tables

PAPERS = ("clip2fl", "fedclip", "fedglcl", "capt", "fst-cbdg")
DOMAINS_OF = {
    "imagefolder:PACS": ("art_painting", "cartoon", "photo", "sketch"),
    "imagefolder:OfficeHome": ("Art", "Clipart", "Product", "Real World"),
    "imagefolder:VLCS": ("Caltech101", "LabelMe", "SUN09", "VOC2007"),
    "imagefolder:office_caltech_10": ("amazon", "caltech", "dslr", "webcam"),
    "imagefolder:DomainNet": ("clipart", "infograph", "painting", "quickdraw", "real", "sketch"),
}


def results_of(specs: list[RunSpec]) -> pd.DataFrame:
    """A line for each run as the store would have it, with 50 % of everything."""
    lines = []
    for position, spec in enumerate(specs):
        domains = DOMAINS_OF.get(spec.dataset.partition("?")[0], ())
        names = [*ACCURACIES, *(f"{head}/{one}" for head in (DOMAINS, SELECTED_DOMAINS) for one in domains)]
        if not domains:
            names = [name for name in names if "domain" not in name]
        metrics = {FINAL + name: 50.0 for name in names} | {"train_seconds": 10.0, f"{FINAL}oracle_round": 5.0}
        clients = len(domains) - bool(spec.scenario.holdout_domain) if domains else spec.scenario.clients
        info = RunInfo({}, spec.dataset.ljust(64, "0"), "", clients, 8, 400, 80, 6, 24)
        tags = run_tags(spec) | info_tags(info)
        held = StoredInfo(
            run_id=str(position),
            experiment_id="1",
            status="FINISHED",
            start_time=1_700_000_000_000 + position,
            end_time=None,
        )
        lines.append(_line("paper", StoredRun(held, StoredData(metrics=metrics, params=flat_params(spec), tags=tags))))
    return pd.DataFrame(lines).assign(made_by="[]")


def is_shown(fact: Mapping[str, str], at: int, table: TextTable) -> bool:
    """Whether the cells of printed numbers of the row ``at``, or the lines below the table, have the fact."""
    value = float(fact["value"])
    cells = [column.texts[at] for column in table.further if "paper" in column.heading]
    forms = {f"{value:.1f}", f"{value:g}", f"{value:.2f}", fact["value"]}
    return any(form in text for form in forms for text in (*cells, *table.notes))


def counts(name: str) -> tuple[int, set[int], set[int]]:
    """Of a suite's paper all facts, those joined to a run, and those that a table shows."""
    suite = load_suite(name)
    published = published_of(suite, published_folder(None))
    assert published is not None
    index = {tuple(fact.items()): at for at, fact in enumerate(published.facts.to_dict("records"))}
    results = with_means(results_of(expand(suite, Overrides(scale="paper", seeds=(0,)))), suite).set_index("run_id")
    no_curves = pd.DataFrame(columns=["mlflow_id", "round", "global_accuracy"])
    board = of_suite(suite.model_copy(update={"means": ()}), results.reset_index(), no_curves, published)
    joined, shown = set(), set()
    for table, text in zip(board.tables, text_tables(board), strict=True):
        for at, line in enumerate(table.lines):
            run = results.loc[line.runs[0]]
            for metric in _metrics(published, run.to_frame().T):
                for fact in _picked(published, _keys(run["published"]), metric, run.to_dict(), every=True):
                    place = index[tuple(fact.items())]
                    joined.add(place)
                    if is_shown(fact, at, text):
                        shown.add(place)
    return len(published.facts), joined, shown


def main() -> None:
    """Print the counts of every paper."""
    total: Counter[str] = Counter()
    for name in PAPERS:
        facts, joined, shown = counts(name)
        total.update(facts=facts, joined=len(joined), shown=len(shown))
        print(f"{name:10} {facts:5} facts, {len(joined):5} joined, {len(shown):5} shown")
    print(f"{'all':10} {total['facts']:5} facts, {total['joined']:5} joined, {total['shown']:5} shown")


if __name__ == "__main__":
    main()
