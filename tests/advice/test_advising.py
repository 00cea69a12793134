"""Advice: measures by hand, the nearest settings, margins, constraints, and the interval from settings left out."""

import math
from dataclasses import asdict

import numpy as np
import pandas as pd
import pytest

from fedbench.core.errors import FedbenchError
from fedbench_boards.advice.advising import NEAREST, Constraints, advise
from fedbench_boards.advice.evidence import (
    SHIPPED,
    Evidence,
    Measures,
    evidence_of,
    measures_of,
    read_counts,
    read_evidence,
    write_evidence,
)


def measures(skew=0.0, **given):
    return Measures(**({"divergence": skew, "effective": 0.5, "imbalance": 1.0, "spread": 0.2, "clients": 1.0,
                        "samples": 2.0, "participation": 0.5} | given))  # fmt: skip


def evidence(scores, skews, **rows):
    """Setting i at the i-th skew, two seeds half a point around a row's score; ``rows``: row -> further columns."""
    lines = []
    for row, own in scores.items():
        for number, (score, skew) in enumerate(zip(own, skews, strict=True)):
            for seed in (0, 1):
                lines.append(
                    {"suite": "s", "setting": f"s{number}", "seed": seed, "row": f"{row} · b", "label": row}
                    | {"method": row, "backbone": "b", "dataset": "d", "run_id": f"{row}{number}{seed}", "commit": "c"}
                    | {"megabytes": 1.0, "global": score + seed - 0.5, "personal": math.nan}
                    | {"labels": "visible", "server_data": "", "trains": True}
                    | asdict(measures(skew))
                    | rows.get(row, {})
                )
    return Evidence(pd.DataFrame(lines))


def test_measures_of_two_clients_by_hand():
    found = measures_of(np.array([[30, 0], [0, 10]]), 0.5)
    # of the whole (3/4, 1/4): m = (7/8, 1/8) for the first client, (3/8, 5/8) for the second
    first = (math.log2(8 / 7) + 0.75 * math.log2(6 / 7) + 0.25 * math.log2(2)) / 2
    second = (math.log2(8 / 5) + 0.75 * math.log2(2) + 0.25 * math.log2(2 / 5)) / 2
    assert found.divergence == pytest.approx((30 * first + 10 * second) / 40)
    assert (found.effective, found.spread) == (pytest.approx(0.5), pytest.approx(0.5))
    assert found.imbalance == pytest.approx(math.log10(3))
    assert (found.clients, found.samples, found.participation) == (math.log10(2), math.log10(20), 0.5)


def test_a_class_that_nobody_holds_leaves_the_imbalance_finite():
    assert measures_of(np.array([[5, 0], [5, 0]]), 1.0).imbalance == pytest.approx(math.log10(20))


def test_a_step_is_a_unit_and_steps_add_as_in_a_plane():
    assert measures(0.1).steps_to(measures(0.2)) == pytest.approx(1.0)
    assert measures(0.1).steps_to(measures(0.4, spread=0.2 + 4 * 0.5)) == pytest.approx(5.0)


def test_the_rows_of_the_setting_itself_decide_where_it_is_measured():
    known = evidence({"fedavg": [50, 60, 70, 80, 90], "low": [60, 50, 50, 50, 50], "high": [40, 50, 60, 90, 99]},
                     [0, 1, 2, 3, 4])  # fmt: skip
    strong = advise(known, measures(0.0), "fedavg")
    assert (strong.choices[0].label, list(strong.nearest)[0]) == ("low", "s0")
    # 10 steps between neighbours: the next weighs exp(-1/2) of the first, those behind exp(-2) and exp(-9/2)
    weights = np.exp([0, -0.5, -2, -4.5])
    weights /= weights.sum()
    assert strong.choices[0].margin == pytest.approx(float(weights @ [10, -10, -20, -30]))
    assert len(strong.nearest) == NEAREST
    assert advise(known, measures(4.0), "fedavg").choices[0].label == "high"


def test_the_interval_is_what_settings_left_out_are_missed_by_in_spreads():
    # one row beats the baseline by 10 everywhere but in s2, by 40
    known = evidence({"fedavg": [50] * 9, "best": [60, 60, 90] + [60] * 6}, list(range(9)))
    beats = np.array([40.0 if one == 2 else 10.0 for one in range(9)])

    def expected(place, settings):
        """Margin at a place and its spread, from the nearest of other settings."""
        near = sorted(settings, key=lambda one: abs(one - place))[:NEAREST]
        steps = np.array([10.0 * abs(one - place) for one in near])
        usual = np.median([min(10 * abs(a - b) for b in settings if b != a) for a in settings])
        weights = np.exp(-(steps**2 - steps.min() ** 2) / (2 * usual**2))
        margin = np.average(beats[near], weights=weights)
        return margin, max(0.5, np.average((beats[near] - margin) ** 2, weights=weights) ** 0.5)

    ratios = []
    for left in range(9):
        margin, spread = expected(left, [one for one in range(9) if one != left])
        ratios.append(abs(margin - beats[left]) / spread)
    here, there = (advise(known, measures(place), "fedavg") for place in (0.0, 8.0))
    # of nine, 90 % is all; s2 is among the four nearest of one place only
    assert here.choices[0].half_width == pytest.approx(max(ratios) * expected(0, range(9))[1])
    assert there.choices[0].half_width == pytest.approx(max(ratios) * 0.5)
    fewer = advise(known.without("s8"), measures(0.0), "fedavg")
    assert fewer.choices[0].half_width == math.inf


def disagreeing():
    """Row best: 10 above the baseline in nine settings, 16 in the first; in the last four its seeds lie 4 away."""
    runs = evidence({"fedavg": [50] * 9, "best": [66] + [60] * 8}, list(range(9))).runs
    best, last = runs["row"] == "best · b", runs["setting"].isin(["s5", "s6", "s7", "s8"])
    runs.loc[best & last, "global"] += runs["seed"].map({0: -4.0, 1: 4.0})
    return runs


def test_the_spread_is_of_seeds_too():
    agreeing = evidence({"fedavg": [50] * 9, "best": [60] * 9}, list(range(9)))
    assert advise(agreeing, measures(0.0), "fedavg").choices[0].half_width == pytest.approx(0.0)  # never missed
    found = advise(Evidence(disagreeing()), measures(8.0), "fedavg").choices[0]
    # s0, left out, is missed by 6 where neighbours and seeds agree to the least spread, 0.5; around s8 seeds lie 4 away
    assert (found.margin, found.half_width) == (pytest.approx(10.0), pytest.approx(6 / 0.5 * 4))


def test_a_setting_weighs_by_its_distance_however_many_seeds_it_has():
    runs = disagreeing()
    runs.loc[(runs["row"] == "best · b") & (runs["setting"] == "s8"), "global"] += 20
    more = runs[runs["setting"] == "s8"]
    known = Evidence(pd.concat([runs, *(more.assign(seed=more["seed"] + 2 * turn) for turn in (1, 2, 3))]))
    few, many = (advise(one, measures(6.5), "fedavg").choices[0] for one in (Evidence(runs), known))
    assert many.half_width == pytest.approx(few.half_width)


def test_without_common_seeds_there_is_no_interval():
    runs = disagreeing()
    runs.loc[runs["row"] == "best · b", "seed"] += 2
    assert advise(Evidence(runs), measures(8.0), "fedavg").choices[0].half_width == math.inf
    # a setting whose neighbours have none does not count among those left out: of nine, eight are too few
    runs = disagreeing()
    near = runs["setting"].isin(["s1", "s2", "s3", "s4"])
    runs.loc[(runs["row"] == "best · b") & near, "seed"] += 2
    assert advise(Evidence(runs), measures(8.0), "fedavg").choices[0].half_width == math.inf
    # nor is there one where misses are known and the spread is not
    runs = evidence({"fedavg": [50] * 20, "best": [60] * 20}, list(range(20))).runs
    runs.loc[(runs["row"] == "best · b") & runs["setting"].isin(["s0", "s1", "s2", "s3"]), "seed"] += 2
    known = Evidence(runs)
    assert advise(known, measures(19.0), "fedavg").choices[0].half_width == pytest.approx(0.0)
    assert advise(known, measures(0.0), "fedavg").choices[0].half_width == math.inf


def test_other_choices_have_the_interval_of_the_first_ones_lead_over_them():
    # over fedavg best leads by as much as fedavg breaks down, over next by 2 everywhere and by 5 in s8
    low = [50, 20, 50, 10, 50, 30, 50, 50, 50]
    known = evidence({"fedavg": low, "best": [60] * 9, "next": [58] * 8 + [55]}, list(range(9)))
    best, following, _ = advise(known, measures(2.0), "fedavg").choices
    assert best.half_width > 30 and following.label == "next"
    # s8, left out, is missed by 3, where neighbours and seeds agree to the least spread; so they do around s2
    assert following.half_width == pytest.approx(3 / 0.5 * 0.5)


def test_where_another_choice_is_itself_the_first_its_lead_over_itself_counts_for_nothing():
    # ten settings: next is first around the last two, so that eight are left to say how far a lead over it is off
    known = evidence({"fedavg": [50] * 10, "best": [60] * 10, "next": [59] * 7 + [80] * 3}, list(range(10)))
    first, *others = advise(known, measures(0.0), "fedavg").choices
    assert first.label == "best" and math.isfinite(first.half_width)
    assert {choice.label: choice.half_width for choice in others}["next"] == math.inf


def test_constraints_leave_out_rows():
    known = evidence(
        {"fedavg": [50] * 3, "big": [90] * 3, "unlabelled": [55] * 3, "server": [95] * 3, "still": [40] * 3},
        [0, 1, 2],
        big={"megabytes": 100.0},
        unlabelled={"labels": "hidden"},
        server={"server_data": "unlabelled"},
        still={"megabytes": 0.0, "trains": False},
    )

    def labels(**given):
        return [choice.label for choice in advise(known, measures(), "fedavg", Constraints(**given)).choices]

    assert labels() == ["big", "unlabelled", "fedavg"]
    assert labels(most_megabytes=10.0) == ["unlabelled", "fedavg", "still"]
    with pytest.raises(FedbenchError, match="with a score for what is needed"):
        advise(known, measures(), "fedavg", Constraints(needs="personal"))
    with pytest.raises(FedbenchError, match="raise --max-mb"):
        advise(known, measures(), "fedavg", Constraints(most_megabytes=-1.0))


def test_far_away_it_says_so():
    known = evidence({"fedavg": [50] * 3, "best": [60] * 3}, [0, 0.1, 0.2])
    assert not advise(known, measures(0.15), "fedavg").is_far
    far = advise(known, measures(0.2, clients=4.0), "fedavg")
    assert far.is_far and far.choices[0].label == "best"


def test_few_settings_and_no_baseline_are_refused():
    with pytest.raises(FedbenchError, match="three at least"):
        advise(evidence({"fedavg": [1, 2]}, [0, 1]), measures(), "fedavg")
    with pytest.raises(FedbenchError, match="no row 'fedprox'"):
        advise(evidence({"fedavg": [1] * 3}, [0, 1, 2]), measures(), "fedprox")
    one, two = (evidence({"fedavg": [1] * 3}, [0, 1, 2], fedavg={"backbone": name}).runs for name in "ab")
    with pytest.raises(FedbenchError, match="'fedavg' on several backbones"):
        advise(Evidence(pd.concat([one, two])), measures(), "fedavg")


def test_a_federation_of_which_the_first_clients_are_recorded_has_all_its_clients(monkeypatch):
    recorded = {"class_counts": [[1, 1], [2, 2]], "clients": 5000}
    monkeypatch.setattr("fedbench_boards.advice.evidence.load_federations", lambda uri, runs: {"m": recorded})
    run = {"suite": "s", "setting": "a", "seed": 0, "row": "r · b", "method": "r", "backbone": "b", "dataset": "d"}
    run |= {"run_id": "1", "mlflow_id": "m", "commit": "c", "untrained": False, "trainable_parameters": "1"}
    run |= {"row_settings": '{"labels": "visible"}', "server_data": "", "cohort_size": 50, "num_clients": 5000}
    assert evidence_of("", pd.DataFrame([run])).places["a"].clients == math.log10(5000)


def test_counts_are_read_in_both_forms(tmp_path):
    wide, long = tmp_path / "wide.csv", tmp_path / "long.csv"
    wide.write_text("client,cat,dog\na,2,0\nb,1,1\n")
    long.write_text("client,label\na,cat\na,cat\nb,cat\nb,dog\n")
    assert read_counts(wide).to_numpy().tolist() == read_counts(long).to_numpy().tolist() == [[2, 0], [1, 1]]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no CSV file"),
        ("a,b\n1,2\n", "needs the column client"),
        ("client,cat,dog\na,1.5,2\n", "whole numbers"),
        ("client,cat,dog\na,-1,2\n", "whole numbers"),
        ("client,cat,dog\na,1,2\na,1,2\n", "a line a client"),
        ("client,cat,dog\na,0,0\n", "must hold a sample"),
        ("client,cat\na,1\n", "two classes"),
        ("client,cat,dog\na,x,2\n", "whole numbers"),
        ("client,cat,dog\na,,2\n", "whole numbers"),
        ("client,cat,dog\na,1,2,3\n", "needs the column client"),
        ("client,client ,cat,dog\na,b,1,2\n", "several columns called 'client'"),
        ("client,cat,cat ,dog\na,1,2,3\n", "several columns called 'cat'"),
        ("client,cat,cat\na,1,2\n", "several columns called 'cat'"),
        ("client,label\na,cat\nb,\n", "lacks its label"),
        ("client,label,weight\na,cat,1\n", "whole numbers"),
    ],
)
def test_other_files_are_refused(tmp_path, text, said):
    file = tmp_path / "counts.csv"
    file.write_text(text)
    with pytest.raises(FedbenchError, match=said):
        read_counts(file)


def test_evidence_is_read_as_it_was_written(tmp_path):
    known = evidence({"fedavg": [50.123456789] * 3, "best": [60] * 3}, [0, 0.1, 0.2])
    for name in ("evidence.csv", SHIPPED):
        write_evidence(known, tmp_path / name)
        pd.testing.assert_frame_equal(read_evidence(tmp_path / name).runs, known.runs, check_dtype=False)
    (tmp_path / "short.csv.gz").write_bytes((tmp_path / SHIPPED).read_bytes()[:90])
    with pytest.raises(FedbenchError, match="no evidence in"):
        read_evidence(tmp_path / "short.csv.gz")
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(FedbenchError, match="lacks the columns"):
        read_evidence(tmp_path / "other.csv")
    with pytest.raises(FedbenchError, match="no evidence in"):
        read_evidence(tmp_path / "none.csv")
    write_evidence(Evidence(known.runs.assign(personal="high")), tmp_path / "words.csv")
    with pytest.raises(FedbenchError, match="needs numbers for .*personal"):
        read_evidence(tmp_path / "words.csv")
