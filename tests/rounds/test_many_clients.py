"""What is recorded, shown and refused where a federation has very many clients."""

import json
from dataclasses import replace

import numpy as np
import pytest

from fedbench.core.errors import FedbenchError
from fedbench.core.records import RunInfo, RunResult
from fedbench.core.spec import RunSpec
from fedbench.runs import prepare as preparing
from fedbench.scenarios.partitions import label_skew
from fedbench.testing import tiny_run, tiny_spec
from fedbench.tracking.artifacts import write_artifacts
from fedbench_boards.leaderboard.page.charts import heat_map

INFO = RunInfo({}, "data", "weights", 2, 1, 10, 4, 6, 24, ("cat", "dog"), ((3, 0), (1, 2)), {})


def recorded(folder, info):
    folder.mkdir()
    write_artifacts(folder, RunSpec(), info, RunResult((), {}, (0, 1), {"w": np.zeros(2, np.float32)}, 1.0))
    return json.loads((folder / "federation.json").read_text())


def test_a_run_records_the_class_counts_of_the_first_clients_and_how_many_there_are(monkeypatch):
    monkeypatch.setattr(preparing, "RECORDED_CLIENTS", 3)
    run = tiny_run(tiny_spec("fedavg"))
    assert (run.info.scenario_clients, len(run.scored.clients)) == (4, 4)
    expected = tuple(tuple(run.scored.class_counts(client).tolist()) for client in range(3))
    assert run.info.class_counts == expected


def test_few_clients_are_all_recorded():
    run = tiny_run(tiny_spec("fedavg"))
    assert len(run.info.class_counts) == run.info.scenario_clients == 4
    assert sum(map(sum, run.info.class_counts)) == run.info.num_train


def test_the_artifact_tells_the_number_of_clients_where_it_has_not_all(tmp_path):
    whole = {"classnames": ["cat", "dog"], "class_counts": [[3, 0], [1, 2]], "groups": {}}
    assert recorded(tmp_path / "old", INFO) == whole
    assert recorded(tmp_path / "all", replace(INFO, scenario_clients=2)) == whole
    assert recorded(tmp_path / "first", replace(INFO, scenario_clients=5)) == whole | {"clients": 5}


def test_the_heat_map_says_that_it_shows_the_first_clients():
    counts, names = [[3, 0], [1, 2]], ["cat", "dog"]
    assert heat_map(counts, names, "k").summary.startswith("2 clients, 2 classes, 6 training samples.")
    assert heat_map(counts, names, "k", 2).summary == heat_map(counts, names, "k").summary
    assert heat_map(counts, names, "k", 5000).summary.startswith("The first 2 of 5,000 clients, 2 classes, 6 training")


@pytest.mark.parametrize(("most", "draws"), [(10**9, 1000), (119, 4), (3, 1)])
def test_a_dirichlet_partition_is_given_up_after_so_many_shares(monkeypatch, most, draws):
    # twelve clients and two classes: 24 shares a draw, so 119 are enough for 4; two samples for everybody would be luck
    monkeypatch.setattr(label_skew, "_MOST_SHARES", most)
    labels = np.arange(24) % 2
    with pytest.raises(FedbenchError, match=f"at least 2 of 24 training samples in {draws} draws"):
        label_skew.dirichlet_uncapped(labels, 12, 0.01, 2, np.random.default_rng(0))
