"""LaTeX as papers print it: chosen columns, order, groups, settings side by side, bold within noise."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from fedbench.cli.app import app
from fedbench.core.errors import FedbenchError
from fedbench_boards.leaderboard.board import leaderboard
from fedbench_boards.leaderboard.latex import PaperOptions, parse_group, to_paper, within_noise
from fedbench_boards.statistics import Test
from tests.leaderboard.test_leaderboard import made, table_of


def results() -> pd.DataFrame:
    """fedprox is best, moon within noise of it, fedavg far below with the same spread; in two settings."""
    runs = made(table_of({"fedavg": [60, 61, 62], "fedprox": [80, 82, 84], "moon": [81, 80, 84]}))
    runs["setting"] = "skew & more"
    other = made(table_of({"fedavg": [50, 51, 52], "fedprox": [40, 41, 42]}, rounds=5))
    other["setting"] = "tail"
    return pd.concat([runs, other], ignore_index=True)


def paper(**options: object) -> str:
    runs = results()
    return to_paper(leaderboard(runs, settings=("skew & more", "tail")), runs, PaperOptions(**options))  # type: ignore[arg-type]


def rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(("fedavg", "fedprox", "moon"))]


def test_bold_is_the_best_and_what_a_paired_test_does_not_tell_from_it() -> None:
    runs = results()
    first = leaderboard(runs, settings=("skew & more", "tail")).tables[0]
    # fedprox 82.0 against moon 81.7: differences -1, 2, 0, p = 0.74; against fedavg 20, 21, 22, p = 0.0007
    assert [line.label for line in first.lines] == ["fedprox", "moon", "fedavg"]
    assert within_noise(first.lines, "global_accuracy", runs, Test.t) == [True, True, False]
    # two seeds can't be tested: the best alone
    assert within_noise(first.lines, "global_accuracy", runs, Test.wilcoxon) == [True, False, False]
    text = paper(columns=("accuracy",))
    assert r"fedprox & \textbf{82.0 $\pm$ 2.0} \\" in text and r"moon & \textbf{81.7 $\pm$ 2.1} \\" in text
    assert r"fedavg & 61.0 $\pm$ 1.0 \\" in text and "Bold: the best, and what a paired test" in text


def test_columns_order_groups_caption_and_label() -> None:
    text = paper(
        columns=("mb", "accuracy"),
        order=("moon", "fedavg"),
        groups=(("Baselines & co", ("fedavg",)),),
        caption="Methods under 50 % skew",
        label="tab:skew",
    )
    first = text.split(r"\end{table}")[0]
    assert [row.split(" ")[0] for row in rows(first)] == ["moon", "fedprox", "fedavg"]
    head = next(line for line in first.splitlines() if line.startswith("method"))
    assert head == r"method & MB & accuracy \\"
    assert first.index(r"\emph{Baselines \& co}") > first.index("fedprox")
    assert r"\caption[{Methods under 50 \% skew}]{Methods under 50 \% skew. Bold" in first
    assert r"\label{tab:skew}" in first and r"\label{tab:skew-1}" in text


def test_settings_stand_side_by_side() -> None:
    text = paper(across=True, label="tab:all")
    assert text.count(r"\begin{table}") == 1 and r"\begin{tabular}{lrr}" in text
    assert r" & \multicolumn{1}{c}{skew \& more} & \multicolumn{1}{c}{tail} \\" in text
    assert r"\cmidrule(lr){2-2}\cmidrule(lr){3-3}" in text
    assert r"moon & \textbf{81.7 $\pm$ 2.1} & -- \\" in text
    assert r"fedavg & 61.0 $\pm$ 1.0 & \textbf{51.0 $\pm$ 1.0} \\" in text


def test_a_setting_without_the_chosen_column_is_not_beside_the_others() -> None:
    runs = results()
    runs["final/tail_accuracy"] = runs["final/global_accuracy"].where(runs["setting"] == "tail")
    board = leaderboard(runs, settings=("skew & more", "tail"))
    text = to_paper(board, runs, PaperOptions(across=True, columns=("tail",)))
    assert r"\begin{tabular}{lr}" in text and r" & \multicolumn{1}{c}{tail} \\" in text
    assert r"\cmidrule(lr){2-2}" in text
    assert "multicolumn{0}" not in text and "moon" not in text


def test_settings_side_by_side_are_captioned_by_what_they_share() -> None:
    (caption,) = (line for line in paper(across=True).splitlines() if line.startswith(r"\caption"))
    # five rounds in one setting, another number in the other
    assert "embedded" in caption and "skew" not in caption and "rounds" not in caption


def test_marks_of_rows_are_printed_and_explained() -> None:
    runs = made(table_of({"fedavg": [60, 61, 62], "fedbn": [70, 70, 73]}))
    own = "final/personal_mean_client_accuracy"
    runs["final/mean_client_accuracy"] = runs["final/global_accuracy"]
    runs[own] = runs["final/global_accuracy"].where(runs["method"] == "fedbn")
    board = leaderboard(runs, headline="personal_mean_client_accuracy")
    for across in (False, True):
        text = to_paper(board, runs, PaperOptions(across=across, columns=("own_models", "delta")))
        assert r"fedavg\S{} & 61.0 $\pm$ 1.0 & -- \\" in text
        assert r"fedbn & \textbf{71.0 $\pm$ 1.7} & $+$10.0 $\pm$ 2.5* \\" in text.replace("$^{*}$", "*")
        below = text.split(r"\end{tabular}")[1]
        assert r"\S{} one model for all" in below and "p $<$ 0.05" in below
    assert "p $<$" not in to_paper(board, runs, PaperOptions(columns=("own_models",)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"columns": ("acuracy",)}, "unknown column of these tables 'acuracy'; did you mean 'accuracy'"),
        ({"order": ("fedporx",)}, "unknown row of these tables 'fedporx'; did you mean 'fedprox'"),
        ({"groups": (("A", ("nobody",)),)}, "unknown row of these tables 'nobody'"),
    ],
)
def test_unknown_names_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(FedbenchError, match=message):
        paper(**options)


def test_a_group_is_written_as_a_name_and_rows() -> None:
    assert parse_group("Prompts=promptfl, capt") == ("Prompts", ("promptfl", "capt"))
    for wrong in ("Prompts", "=a", "Prompts="):
        with pytest.raises(FedbenchError, match="is not NAME=ROW,ROW"):
            parse_group(wrong)
    result = CliRunner().invoke(app, ["leaderboard", "--across", "--format", "md"])
    assert result.exit_code == 2 and "are for --format latex" in " ".join(result.output.split())


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="pdflatex is not on the PATH")
def test_it_compiles(tmp_path: Path) -> None:
    body = paper(across=True, groups=(("Baselines", ("fedavg",)),), caption="[Σ]", label="tab:x").replace("Σ", "sum")
    (tmp_path / "x.tex").write_text(
        "\\documentclass{article}\\usepackage{booktabs,graphicx}\\begin{document}" + body + "\\end{document}",
        encoding="utf-8",
    )
    subprocess.run(["pdflatex", "-halt-on-error", "x.tex"], cwd=tmp_path, check=True, capture_output=True)


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="pdflatex is not on the PATH")
def test_a_wide_table_is_as_wide_as_the_text(tmp_path: Path) -> None:
    body = paper(across=True, columns=("accuracy", "delta", "mb", "train_s"))
    head = "\\documentclass[twocolumn]{article}\\usepackage{booktabs,graphicx}\\begin{document}"
    (tmp_path / "x.tex").write_text(head + body + "\\end{document}", encoding="utf-8")
    done = subprocess.run(["pdflatex", "-halt-on-error", "x.tex"], cwd=tmp_path, check=True, capture_output=True)
    assert b"Overfull" not in done.stdout
