"""Advice: measures by hand, the nearest settings, margins, constraints, and the interval from settings left out."""

import math
from dataclasses import asdict

import numpy as np
import pandas as pd
import pytest

from fedbench.core.errors import FedbenchError
from fedbench_boards.advice.advising import Constraints, Forecaster, caveats, quantile
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
                    | {"megabytes": 1.0, "seconds": 2.0, "global": score + seed - 0.5, "personal": math.nan}
                    | {"server_data": ""}
                    | asdict(measures(skew))
                    | rows.get(row, {})
                )
    return Evidence(pd.DataFrame(lines))


def on_data(known, *names):
    """The evidence with a data set for each setting."""
    at = known.runs["setting"].str[1:].astype(int)
    return Evidence(known.runs.assign(dataset=at.map(dict(enumerate(names)))))


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


def test_margins_are_means_over_the_seeds_that_row_and_baseline_share():
    runs = evidence({"fedavg": [50, 60, 70], "best": [60, 60, 60], "server": [99] * 3}, [0, 1, 2],
                    server={"server_data": "unlabelled"}).runs  # fmt: skip
    runs.loc[(runs["label"] == "best") & (runs["setting"] == "s0") & (runs["seed"] == 1), "seed"] = 7
    runs = runs[(runs["label"] != "best") | (runs["setting"] != "s2")]
    margins = Forecaster(Evidence(runs), "fedavg").margins
    assert list(margins) == ["best", "fedavg"]  # data at the server is what the user may not have
    assert margins["best"].tolist()[:2] == [10, 0] and math.isnan(margins["best"]["s2"])
    assert margins["fedavg"].tolist() == [0, 0, 0]


def test_a_forecast_is_by_the_measures():
    low, high = list(range(8)), [-10] * 4 + [10] * 4
    known = evidence({"fedavg": [50] * 8, "best": [50 + gain for gain in high], "next": [55] * 8}, low)
    weak, strong = (Forecaster(known, "fedavg").advise(measures(skew)) for skew in (0.0, 7.0))
    assert [choice.row for choice in weak.choices] == ["next", "fedavg", "best"]
    assert [choice.row for choice in strong.choices] == ["best", "next", "fedavg"]
    # leaves of two settings and more: a mean of what is near, never beyond what was measured
    assert 5 < strong.choices[0].margin <= 10 and strong.choices[1].margin == pytest.approx(5)


def test_a_row_that_was_not_run_everywhere_is_forecast_from_where_it_was():
    runs = evidence({"fedavg": [50] * 8, "some": [60] * 8, "once": [70] * 8}, list(range(8))).runs
    absent = (runs["label"] == "some") & runs["setting"].isin(["s0", "s1"])
    absent |= (runs["label"] == "once") & (runs["setting"] != "s3")
    found = Forecaster(Evidence(runs[~absent]), "fedavg").advise(measures(0.0))
    assert [(choice.row, choice.margin) for choice in found.choices] == [("some", 10), ("fedavg", 0)]


def test_a_row_that_was_run_on_one_of_several_data_sets_is_not_advised():
    known = on_data(evidence({"fedavg": [50] * 10, "best": [60] * 10, "one": [90] * 10}, [0.0, 1] * 5), *"aaaaabbbbb")
    known = Evidence(known.runs[(known.runs["label"] != "one") | (known.runs["dataset"] == "a")])
    found = Forecaster(known, "fedavg").advise(measures(0.0))
    # nor does it count as the best that was measured
    assert [choice.row for choice in found.choices] == ["best", "fedavg"] and found.enough == 1
    assert "Not forecast, since run on one data set only: one." in list(caveats(found))


def test_the_quantile_is_the_conformal_one():
    # of nine errors, 90 % of ten is the ninth; of eight there is none
    assert quantile(pd.Series([3.0, 1, 2, 9, 5, 4, 8, 6, 7])) == 9
    assert quantile(pd.Series(range(8), dtype=float)) == math.inf
    assert quantile(pd.Series(range(19), dtype=float)) == 17  # ceil(0.9 * 20) = 18th


def test_an_interval_is_of_the_errors_on_data_left_out():
    # best gains 10 on one data set and 30 on the other: each is forecast by the other, 20 off
    known = evidence({"fedavg": [50] * 10, "best": [60] * 5 + [80] * 5, "same": [57] * 10}, [0.0, 1] * 5)
    found = Forecaster(on_data(known, *"aaaaabbbbb"), "fedavg").advise(measures(0.0))
    widths = {choice.row: choice.half_width for choice in found.choices}
    assert widths == {"best": pytest.approx(20), "same": pytest.approx(0), "fedavg": 0}
    assert found.is_new_data and "forecast by other data sets" in next(caveats(found))
    # of one data set, each setting is left out; of so few there is no interval
    few = Forecaster(evidence({"fedavg": [50] * 5, "best": [60] * 5}, [0.0, 1, 2, 3, 4]), "fedavg").advise(measures())
    assert few.choices[0].half_width == math.inf and few.enough is None and not few.is_new_data
    assert "too few measured settings" in next(caveats(few)) and len(few.to_try) == 2


def test_so_many_rows_are_to_try_that_one_was_near_the_best_on_data_left_out():
    def enough(first, second, **further):
        scores = {"fedavg": [50] * 10, "a": first, "b": second} | further
        found = Forecaster(on_data(evidence(scores, [0.0, 1] * 5), *"aaaaabbbbb"), "fedavg")
        return found.enough(list(scores)), found

    assert enough([60] * 10, [55] * 10)[0] == 1
    # what is best on the one data set is second on the other
    number, found = enough([60] * 5 + [55] * 5, [55] * 5 + [60] * 5)
    assert number == 2 and len(found.advise(measures(0.0)).to_try) == 2
    # within a point of the best is near it
    assert enough([60] * 5 + [59] * 5, [59] * 5 + [60] * 5)[0] == 1
    # in one setting of ten it takes all rows: with ten, 90 % of eleven is all
    assert enough([60] * 10, [55] * 10, c=[20] * 9 + [90])[0] == 4


def test_settings_in_which_no_row_is_both_measured_and_forecast_count_for_nothing():
    # without a, one setting is left, by which nothing can be forecast
    few = Forecaster(on_data(evidence({"fedavg": [50] * 3, "best": [60] * 3}, [0, 1, 2]), *"aab"), "fedavg")
    advice = few.advise(measures(0.0))
    assert advice.enough is None and [choice.row for choice in advice.choices] == ["best", "fedavg"]
    # a row that is all that a limit leaves, and that a setting lacks
    runs = evidence({"fedavg": [50] * 4, "cheap": [60] * 4}, [0, 1, 2, 3], cheap={"megabytes": 0.1}).runs
    runs = runs[(runs["label"] != "cheap") | (runs["setting"] != "s0")]
    advice = Forecaster(Evidence(runs), "fedavg").advise(measures(0.0), Constraints(most_megabytes=0.5))
    assert [choice.row for choice in advice.choices] == ["cheap"]


def test_data_sets_of_one_setting_each_are_data_sets():
    known = on_data(evidence({"fedavg": [50] * 3, "best": [60] * 3}, [0, 1, 2]), *"abc")
    assert Forecaster(known, "fedavg").advise(measures(0.0)).is_new_data


def test_costs_are_those_of_as_many_clients_as_here():
    known = evidence({"fedavg": [50] * 9, "best": [60] * 9}, list(range(9)), best={"megabytes": 30.0, "seconds": 7.0})
    # ten clients of which half take part, so 6 MB each; here a hundred, of which 40
    best = Forecaster(known, "fedavg").advise(measures(0.0, clients=2.0, participation=0.4)).choices[0]
    assert (best.megabytes, best.seconds) == (pytest.approx(240), 7)

    def labels(**given):
        found = Forecaster(known, "fedavg").advise(measures(0.0), Constraints(**given))
        return [choice.row for choice in found.choices]

    assert labels() == ["best", "fedavg"]
    assert labels(most_megabytes=29.0) == labels(most_seconds=6.0) == ["fedavg"]
    with pytest.raises(FedbenchError, match="raise --max-mb or --max-seconds"):
        labels(most_megabytes=0.5)


def test_far_away_it_says_so():
    forecaster = Forecaster(evidence({"fedavg": [50] * 3, "best": [60] * 3}, [0, 0.1, 0.2]), "fedavg")
    assert not forecaster.advise(measures(0.15)).is_far
    far = forecaster.advise(measures(0.2, clients=4.0))
    assert far.is_far and any("Far from all that is measured" in text for text in caveats(far))
    assert forecaster.advise(measures(0.15, domains=1.0)).is_far


def test_a_lead_that_may_be_none_is_said_to_be_uncertain():
    known = evidence({"fedavg": [50] * 10, "best": [51] * 5 + [58] * 5}, [0.0, 1] * 5)
    found = Forecaster(on_data(known, *"aaaaabbbbb"), "fedavg").advise(measures(0.0))
    assert "That best beats fedavg here is not certain: its interval holds zero." in list(caveats(found))


def test_few_settings_and_no_baseline_are_refused():
    with pytest.raises(FedbenchError, match="advice needs three"):
        Forecaster(evidence({"fedavg": [1, 2]}, [0, 1]), "fedavg").advise(measures())
    with pytest.raises(FedbenchError, match="no row 'fedprox'"):
        Forecaster(evidence({"fedavg": [1] * 3}, [0, 1, 2]), "fedprox").advise(measures())
    with pytest.raises(FedbenchError, match="with a score for what is needed"):
        Forecaster(evidence({"fedavg": [1] * 3}, [0, 1, 2]), "fedavg", "personal").advise(measures())


def test_a_federation_of_which_the_first_clients_are_recorded_has_all_its_clients(monkeypatch):
    recorded = {"class_counts": [[1, 1], [2, 2]], "clients": 5000}
    monkeypatch.setattr("fedbench_boards.advice.evidence.load_federations", lambda uri, runs: {"m": recorded})
    run = {"suite": "s", "setting": "a", "seed": 0, "row": "r · b", "method": "r", "backbone": "b", "dataset": "d"}
    run |= {"run_id": "1", "mlflow_id": "m", "commit": "c", "untrained": False, "trainable_parameters": "1"}
    run |= {"row_settings": '{"labels": "visible"}', "server_data": "", "cohort_size": 50, "num_clients": 5000}
    run |= {"scenario_settings": '{"partition": "domain?x=1"}'}
    place = evidence_of("", pd.DataFrame([run])).places["a"]
    assert (place.clients, place.participation, place.domains) == (math.log10(5000), 0.01, 1.0)


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
