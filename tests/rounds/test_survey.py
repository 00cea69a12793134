"""The seam for clients that report without training: who is asked when, what it costs, what the server makes of it."""

from dataclasses import replace

import pytest
import torch

from fedbench.core.errors import FedbenchError
from fedbench.core.method.hooks import hookimpl
from fedbench.core.types import Broadcast, Predictions
from fedbench.plugins.assembly import assemble
from fedbench.rounds.executors.sequential import Sequential
from fedbench.rounds.loop import rounds, train_round
from fedbench.rounds.metrics import size_in_bytes
from fedbench.rounds.state import load_state, save_state
from fedbench.testing import digest, final_state, tiny_run, tiny_spec

PAYLOAD = 3 * 4
"""Bytes of what `Asking` broadcasts beside the weights."""


class Asking:
    """Surveys whom ``answers`` names by round, nobody by default; keeps all it is told."""

    def __init__(self, answers=None):
        self.answers = answers or {}
        self.asked, self.tasks, self.told = [], [], []

    @hookimpl
    def survey(self, round, spec, state):
        self.asked.append(round)
        return self.answers.get(round, "nobody")

    @hookimpl
    def report(self, task):
        """The client's number of samples and the sum of what it received."""
        self.tasks.append(task)
        total = sum(weight.double().sum() for weight in task.received.values())
        return {"size": torch.tensor([float(len(task.inputs))]), "sum": total[None]}

    @hookimpl
    def reported(self, task):
        self.told.append(task)
        sizes = torch.cat([report["size"] for report in task.reports.values()])
        task.state["asking"] = {"mean": sizes.mean()[None], "round": torch.tensor([task.round])}

    @hookimpl
    def broadcast(self, task):
        return Broadcast(task.weights, {"three": torch.zeros(3)})


def run_with(*plugins, dropout=0.0, **training):
    spec = tiny_spec("fedavg", **training)
    spec = spec.model_copy(update={"scenario": spec.scenario.model_copy(update={"dropout": dropout})})
    run = tiny_run(spec)
    hooks = assemble("fedavg", {}, listeners=list(plugins)).hooks
    # a plugin that is added here stands in no table of owners, by which the cohort executor goes
    return replace(run, assembly=replace(run.assembly, hooks=hooks), executor=Sequential())


def records_of(run):
    return {record.round: record for _, record, _ in rounds(run, run.initial_state())}


def test_it_is_asked_before_every_round_and_once_after_the_last():
    plugin = Asking()
    final_state(run_with(plugin, rounds=3))
    assert plugin.asked == [1, 2, 3, 4] and plugin.tasks == plugin.told == []


def test_by_default_nobody_is_and_numbers_and_bytes_are_those_without_the_seam():
    plain = tiny_run(tiny_spec("fedavg", rounds=2), executor="sequential")
    ours = run_with(Asking(), rounds=2)
    assert plain.assembly.hooks.survey(round=1, spec=plain.spec, state={}) == "nobody"
    assert digest(final_state(ours)) == digest(final_state(plain))
    bytes_plain, bytes_ours = records_of(plain), records_of(ours)
    for number in (0, 1, 2):
        assert bytes_ours[number].bytes_up == bytes_plain[number].bytes_up
    model = plain.info.round_bytes
    assert [bytes_plain[number].bytes_down for number in (0, 1, 2)] == [0, 2 * model, 2 * model]


def test_surveys_that_the_server_makes_nothing_of_leave_training_as_it_was():
    plain = digest(final_state(run_with(Asking(), rounds=2)))
    assert digest(final_state(run_with(Asking({1: "cohort", 2: "everyone", 3: "everyone"}), rounds=2))) == plain


def test_the_cohort_reports_on_the_model_that_it_trains_from_and_receives_it_once():
    plugin = Asking({1: "cohort", 2: "cohort"})
    run = run_with(plugin, rounds=2)
    records = records_of(run)
    model = run.info.round_bytes
    for number in (1, 2):
        record = records[number]
        assert [task.client for task in plugin.tasks if task.round == number] == list(record.cohort)
        assert record.bytes_down == 2 * (model + PAYLOAD)
        # a float32 and a float64 each
        assert record.bytes_up == 2 * (model + 4 + 8)
        told = plugin.told[number - 1]
        assert (told.round, told.cohort, tuple(told.reports)) == (number, record.cohort, record.cohort)
    received = plugin.tasks[0].received
    assert all(torch.equal(received[name], weight) for name, weight in run.model.weights.items())


def test_everyone_elses_model_is_counted_as_sent_down_and_the_cohorts_once():
    plugin = Asking({2: "everyone"})
    run = run_with(plugin, rounds=2)
    records = records_of(run)
    model = run.info.round_bytes
    assert [task.client for task in plugin.tasks] == [0, 1, 2, 3]
    assert records[1].bytes_down == 2 * (model + PAYLOAD) and records[1].bytes_up == 2 * model
    assert records[2].bytes_down == 2 * (model + PAYLOAD) + 2 * (model + PAYLOAD)
    assert records[2].bytes_up == 2 * model + 4 * 12
    assert plugin.told[0].cohort == records[2].cohort and list(plugin.told[0].reports) == [0, 1, 2, 3]


def test_after_the_last_round_everyone_receives_the_final_model_and_is_counted_with_that_round():
    plugin = Asking({3: "everyone"})
    run = run_with(plugin, rounds=2)
    *_, (state, record, _) = rounds(run, run.initial_state())
    model = run.info.round_bytes
    assert record.round == 2
    assert record.bytes_down == 2 * (model + PAYLOAD) + 4 * (model + PAYLOAD)
    assert record.bytes_up == 2 * model + 4 * 12
    assert plugin.told[0].cohort == () and plugin.told[0].round == 3
    for task in plugin.tasks:
        assert task.round == 3
        assert all(torch.equal(task.received[name], weight) for name, weight in state.weights.items())
    assert all(torch.equal(plugin.told[0].weights[name], weight) for name, weight in state.weights.items())


def test_what_the_last_survey_gave_is_there_when_the_last_round_is_evaluated():
    class Evaluating(Asking):
        @hookimpl
        def evaluate(self, task):
            """Half the round of the last survey as everybody's class."""
            known = task.state.get("asking", {"round": torch.tensor([0])})["round"]
            return Predictions((known // 2).expand(len(task.inputs)).clone())

    run = run_with(Evaluating({2: "cohort", 4: "everyone"}), rounds=3)
    seen = [answer.labels[0].item() for _, _, answer in rounds(run, run.initial_state())]
    assert seen == [0, 0, 1, 2]


def test_without_rounds_the_survey_after_the_last_comes_before_the_only_evaluation():
    plugin = Asking({1: "everyone"})
    run = run_with(plugin, rounds=0)
    records = records_of(run)
    assert list(records) == [0] and len(plugin.tasks) == 4
    assert records[0].bytes_up == 4 * 12 and records[0].bytes_down == 4 * (run.info.round_bytes + PAYLOAD)


def test_who_drops_out_of_the_round_does_not_report_in_it():
    for who in ("cohort", "everyone"):
        plugin = Asking({1: who})
        run = run_with(plugin, dropout=0.5, rounds=1)
        run = replace(run, spec=run.spec.model_copy(update={"seed": 2}))
        _, record = train_round(run, run.initial_state())
        [told] = plugin.told
        assert len(record.cohort) == 1 and told.cohort == record.cohort
        outside = 2 if who == "everyone" else 0
        assert len(told.reports) == 1 + outside and record.cohort[0] in told.reports
        # both drawn clients have received the model
        assert record.bytes_down == (2 + outside) * (run.info.round_bytes + PAYLOAD)


@pytest.mark.parametrize("answer", ["all", 1, ""])
def test_another_answer_is_refused_in_one_sentence(answer):
    run = run_with(Asking({1: answer}))
    with pytest.raises(FedbenchError, match=r"hook survey with .*; it must be nobody, cohort or everyone\.$") as caught:
        train_round(run, run.initial_state())
    assert "\n" not in str(caught.value) and repr(answer) in str(caught.value)


def test_a_method_that_forgets_to_answer_is_refused():
    run = run_with(Asking({1: None}))
    with pytest.raises(FedbenchError, match="answers the hook survey but returned None"):
        train_round(run, run.initial_state())


def test_two_methods_that_report_under_one_name_are_refused():
    class Second:
        @hookimpl
        def report(self, task):
            return {"size": torch.zeros(1)}

    with pytest.raises(FedbenchError, match="both send 'size'"):
        final_state(run_with(Second(), Asking({1: "cohort"})), until=1)


def test_two_methods_that_report_under_different_names_are_both_heard():
    class Second:
        @hookimpl
        def report(self, task):
            return {"other": torch.zeros(1)}

    plugin = Asking({1: "cohort"})
    final_state(run_with(Second(), plugin), until=1)
    assert all(set(report) == {"size", "sum", "other"} for report in plugin.told[0].reports.values())


def test_reports_of_nothing_cost_nothing_up():
    class Silent(Asking):
        @hookimpl
        def report(self, task): ...

        @hookimpl
        def reported(self, task):
            self.told.append(task)

    plugin = Silent({1: "cohort"})
    run = run_with(plugin)
    _, record = train_round(run, run.initial_state())
    assert record.bytes_up == 2 * run.info.round_bytes
    assert all(report == {} for report in plugin.told[0].reports.values())


def test_resumed_in_the_middle_a_run_gives_the_same_numbers_and_asks_no_round_twice(tmp_path):
    answers = {1: "cohort", 2: "everyone", 3: "cohort", 4: "everyone"}
    whole = Asking(answers)
    run = run_with(whole, rounds=3)
    expected = list(rounds(run, run.initial_state()))
    first, second = Asking(answers), Asking(answers)
    run = run_with(first, rounds=3)
    save_state(final_state(run, until=1), tmp_path / "half.safetensors", run.spec.run_id)
    half = load_state(tmp_path / "half.safetensors", run.spec.run_id)
    resumed = run_with(second, rounds=3)
    got = list(rounds(resumed, half))
    assert first.asked == [1] and second.asked == [2, 3, 4]
    assert digest(got[-1][0]) == digest(expected[-1][0])
    assert torch.equal(got[-1][0].server["asking"]["mean"], expected[-1][0].server["asking"]["mean"])
    for (_, mine, _), (_, theirs, _) in zip(got, expected[2:], strict=True):
        assert (mine.bytes_up, mine.bytes_down, mine.metrics) == (theirs.bytes_up, theirs.bytes_down, theirs.metrics)
    for mine, theirs in zip(second.told, whole.told[1:], strict=True):
        assert all(torch.equal(mine.reports[k]["sum"], theirs.reports[k]["sum"]) for k in theirs.reports)


def test_private_tensors_are_in_what_a_client_reports_on_but_not_in_what_it_is_sent():
    class Private(Asking):
        @hookimpl
        def private(self, model, spec):
            return ["head.bias"]

    plugin = Private({3: "everyone"})
    run = run_with(plugin, rounds=2)
    run = replace(run, private=frozenset({"head.bias"}))
    *_, (state, record, _) = rounds(run, run.initial_state())
    sent = size_in_bytes({name: w for name, w in state.weights.items() if name != "head.bias"}, state.buffers)
    assert record.bytes_down == 6 * (sent + PAYLOAD)
    assert "head.bias" not in plugin.told[0].weights
    for task in plugin.tasks:
        own = state.own.get(task.client, {}).get("head.bias", run.model.weights["head.bias"])
        assert torch.equal(task.received["head.bias"], own)
    assert any(not torch.equal(task.received["head.bias"], run.model.weights["head.bias"]) for task in plugin.tasks)
