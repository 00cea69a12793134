"""A leaderboard as LaTeX: one ``table`` environment per table of the board, or what a paper prints of it.

A paper has chosen columns, rows in groups, settings side by side, bold within noise. LaTeX for a document that loads
``booktabs`` and ``graphicx``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import pandas as pd

from fedbench.core.errors import FedbenchError, unknown_name
from fedbench.kinds.measured import lower_is_better
from fedbench.tracking.schema import FINAL
from fedbench_boards.leaderboard import own_models
from fedbench_boards.leaderboard.failures import MARK
from fedbench_boards.leaderboard.model import Board, Line, Table
from fedbench_boards.leaderboard.notes import SIGN
from fedbench_boards.leaderboard.rows import may_be_best
from fedbench_boards.leaderboard.tables import Cell, Column, TextTable, text_tables
from fedbench_boards.statistics import ALPHA, Test, holm, paired

_SPECIAL = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"$<$",
    ">": r"$>$",
    **{character: f"\\{character}" for character in "&%$#_"},
    "±": r"$\pm$",
    "≠": r"$\neq$",
    "≈": r"$\approx$",
    "≥": r"$\geq$",
    "–": "--",
    "·": r"$\cdot$",
    "×": r"$\times$",
    "→": r"$\rightarrow$",
    "†": r"\dag{}",
    "‡": r"\ddag{}",
    "§": r"\S{}",
    "…": r"\ldots{}",
    "*": r"$^{*}$",
}
_GREEK = {
    "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ε": "epsilon", "η": "eta", "θ": "theta", "λ": "lambda",
    "μ": "mu", "ρ": "rho", "σ": "sigma", "τ": "tau", "Δ": "Delta",
}  # fmt: skip
_ESCAPES = _SPECIAL | {letter: f"$\\{name}$" for letter, name in _GREEK.items()}
_SIGN = re.compile(r"^[-+](?=\d)")
HEAD = "% \\usepackage{booktabs,graphicx}\n\n"
"""A comment with the packages that the document has to load."""
_ESCAPED = re.compile("|".join(re.escape(character) for character in _ESCAPES))


def to_latex(board: Board) -> str:
    """Every table of the board under its caption and above what its marks mean."""
    return HEAD + "\n".join(map(_of_table, text_tables(board)))


def escape(text: str) -> str:
    """``text`` as LaTeX prints it; letters and signs beyond ASCII that pdfLaTeX lacks are set in mathematics."""
    # on one line, since an empty one would end a paragraph, which a caption or a cell may not
    return _ESCAPED.sub(lambda match: _ESCAPES[match.group()], " ".join(text.split()))


def _of_table(shown: TextTable) -> str:
    # a reason is too long for a cell
    status = [
        Column(column.heading, [Cell(text.partition(":")[0]) for text in column.texts]) for column in shown.status
    ]
    shown = replace(shown, status=status)
    alignment = "".join("l" if shown.is_words(column) else "r" for column in shown.columns)
    lines = [
        [escape(column.heading) for column in shown.columns],
        r"\midrule",
        *([latex_cell(cell) for cell in line] for line in shown.lines),
    ]
    rows = zip(shown.names[0].cells, shown.of.lines if shown.of else (), strict=True)
    failures = [f"{name.sign} {name.text}: {line.status.text}".strip() for name, line in rows if line.status.text]
    return _environment([rf"\caption{{{escape(shown.caption)}}}"], alignment, lines, [*failures, *shown.notes])


def _environment(
    above: Sequence[str], alignment: str, lines: Sequence[str | Sequence[str]], notes: Iterable[str]
) -> str:
    """A table of ``lines``, which are cells or rules; one that is wider than the text is made as small as that."""
    body = [line if isinstance(line, str) else " & ".join(line) + r" \\" for line in lines]
    return "\n".join(
        [
            r"\begin{table}[htbp]",
            r"\centering\small",
            *above,
            r"\smallskip",
            r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
            rf"\begin{{tabular}}{{{alignment}}}",
            r"\toprule",
            *body,
            r"\bottomrule",
            r"\end{tabular}}",
            *(rf"\par\smallskip{{\footnotesize {escape(note)}\par}}" for note in notes),
            r"\end{table}",
            "",
        ]
    )


def latex_cell(cell: Cell) -> str:
    """The cell with its sign, bold where it is the best."""
    text = _SIGN.sub(lambda match: f"${match.group()}$", escape(cell.text))
    return (rf"\textbf{{{text}}}" if cell.best else text) + escape(cell.sign)


@dataclass(frozen=True, kw_only=True)
class PaperOptions:
    """The look of the table; whatever is empty is as in the leaderboard."""

    columns: tuple[str, ...] = ()
    """Headings of the leaderboard in small letters, with underscores for spaces: ``accuracy``, ``worst_client``,
    ``mb``; ``delta`` for the difference to the baseline. By default the accuracies and ``mb``."""
    order: tuple[str, ...] = ()
    """Rows by label or method; other rows follow in the leaderboard's order."""
    groups: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Headings with the rows below them; rows in no group come first."""
    caption: str = ""
    label: str = ""
    across: bool = False
    """Whether all settings are side by side in one table."""


def parse_group(text: str) -> tuple[str, tuple[str, ...]]:
    """Parse ``Name=row,row`` of the option ``--group``."""
    name, sign, rows = text.partition("=")
    if not sign or not name.strip() or not rows.strip():
        raise FedbenchError(f"--group {text!r} is not NAME=ROW,ROW; write for instance --group Prompts=promptfl,capt.")
    return name.strip(), tuple(row.strip() for row in rows.split(","))


def to_paper(board: Board, results: pd.DataFrame, options: PaperOptions, test: Test = Test.t) -> str:
    """The tables of ``board`` as LaTeX; ``results`` have the runs' metrics by run id, for what is within noise.

    Raises FedbenchError for a column or row that no table has.
    """
    parts = [
        _PaperPart(table, shown, results, test) for table, shown in zip(board.tables, text_tables(board), strict=True)
    ]
    if not parts:
        raise FedbenchError("there is no table to write.")
    _refuse_unknown(parts, options)
    if options.across:
        return HEAD + _paper_environment(parts, options, options.label)
    labels = [f"{options.label}-{n}" if n and options.label else options.label for n in range(len(parts))]
    return HEAD + "\n".join(
        _paper_environment([part], options, label) for part, label in zip(parts, labels, strict=True)
    )


_OF_DELTA = (SIGN, "Δ:")
_SIGNS = (*_OF_DELTA, MARK, own_models.UNTRAINED_MARK, own_models.ONE_FOR_ALL_MARK)


class _PaperPart:
    """One table of the board, by the names of its rows and columns."""

    def __init__(self, table: Table, shown: TextTable, results: pd.DataFrame, test: Test) -> None:
        self.title = table.lines[0].setting or table.lines[0].dataset
        self.caption = shown.caption
        self.lines = table.lines
        self.names = shown.names[0].texts
        self._signs = [cell.sign for cell in shown.names[0].cells]
        self.marks = [text for text in (*shown.failures, *shown.notes) if text.startswith(_SIGNS)]
        """The lines that explain marks."""
        self.columns: dict[str, Column] = {}
        self.usual: list[str] = []
        for column in (*shown.scores, *shown.further):
            name = "delta" if column.key == "delta" else column.heading.lower().replace(" ", "_")
            bold = [False] * len(table.lines)
            if column.key in table.shown:
                bold = within_noise(table.lines, column.key, results, test)
                self.usual.append(name)
            cells = [replace(cell, best=is_best) for cell, is_best in zip(column.cells, bold, strict=True)]
            self.columns[name] = replace(column, cells=cells)
        self.usual += ["mb"] if "mb" in self.columns else []

    def row(self, name: str) -> int | None:
        """Position of the row called ``name``; None if it is not in this table."""
        return self.names.index(name) if name in self.names else None

    def cell(self, column: str, row: int | None) -> str:
        """A cell in LaTeX; a dash where the table lacks the row."""
        return "--" if row is None else latex_cell(self.columns[column].cells[row])

    def sign(self, row: int | None) -> str:
        """The mark behind the row's name, such as † for a row that lost seeds."""
        return "" if row is None else self._signs[row]


def within_noise(lines: Sequence[Line], metric: str, results: pd.DataFrame, test: Test) -> list[bool]:
    """Whether each row has the best mean of ``metric``, or one that a paired test over seeds does not tell from it.

    p-values are corrected by Holm over the rows. A row whose difference can't be tested (few seeds) is not bold.
    """
    column = FINAL + metric
    eligible = [may_be_best(line, metric) and not math.isnan(line.cell(metric).mean) for line in lines]
    means = {n: line.cell(metric).mean for n, (line, may) in enumerate(zip(lines, eligible, strict=True)) if may}
    if len(means) < 2 or column not in results:
        return [False] * len(lines)
    choose: Callable[..., int] = min if lower_is_better(metric) else max
    best = choose(means, key=lambda n: means[n])
    of_run: Mapping[str, float] = dict(zip(results["run_id"], results[column], strict=True))
    tested = {}
    for number in means.keys() - {best}:
        seeds = sorted(lines[number].runs.keys() & lines[best].runs.keys())
        ours, theirs = ([of_run.get(lines[n].runs[seed], math.nan) for seed in seeds] for n in (number, best))
        outcome = paired(ours, theirs, test)
        if not math.isnan(outcome.p_value):
            tested[number] = outcome.p_value
    corrected = dict(zip(tested, holm(list(tested.values())), strict=True))
    equal = {n for n, mean in means.items() if round(mean, 1) == round(means[best], 1)}
    return [n == best or n in equal or corrected.get(n, 0.0) >= ALPHA for n in range(len(lines))]


def _paper_environment(parts: Sequence[_PaperPart], options: PaperOptions, label: str) -> str:
    chosen = [[name for name in options.columns or part.usual if name in part.columns] for part in parts]
    if options.across and not options.columns:
        chosen = [names[:1] for names in chosen]
    # side by side, a setting without any of the columns would have no width
    pairs = [(part, names) for part, names in zip(parts, chosen, strict=True) if names or not options.across]
    alignment = "l" + "".join("r" * len(names) for names in chosen)
    heads = ["method", *(escape(part.columns[name].heading) for part, names in pairs for name in names)]
    bold = f"Bold: the best, and what a paired test over seeds does not tell from it (Holm, {ALPHA:g})."
    caption = f"{options.caption or _common(parts)}. {bold}".replace("..", ".")
    short = f"[{{{escape(options.caption)}}}]" if options.caption else ""
    above = [rf"\caption{short}{{{escape(caption)}}}", *([rf"\label{{{label}}}"] if label else [])]
    marks = dict.fromkeys(
        text for part, names in pairs for text in part.marks if not text.startswith(_OF_DELTA) or "delta" in names
    )
    lines = [*(_settings_line(pairs) if options.across else []), heads, *_body(pairs, options, len(alignment))]
    return _environment(above, alignment, lines, marks)


_Pairs = Sequence[tuple["_PaperPart", Sequence[str]]]
"""Tables with the names of their columns that are chosen."""


def _common(parts: Sequence[_PaperPart]) -> str:
    """The parts that all captions share."""
    captions = [part.caption.split(" · ") for part in parts]
    return " · ".join(text for text in captions[0] if all(text in caption for caption in captions))


def _settings_line(pairs: _Pairs) -> Iterator[str | list[str]]:
    """The line of settings above their columns."""
    yield ["", *(rf"\multicolumn{{{len(names)}}}{{c}}{{{escape(part.title)}}}" for part, names in pairs)]
    first = 2
    rules = []
    for _, names in pairs:
        rules.append(rf"\cmidrule(lr){{{first}-{first + len(names) - 1}}}")
        first += len(names)
    yield "".join(rules)


def _body(pairs: _Pairs, options: PaperOptions, width: int) -> Iterator[str | list[str]]:
    parts = [part for part, _ in pairs]
    for title, rows in _grouped(parts, options):
        yield r"\midrule"
        if title:
            yield [rf"\multicolumn{{{width}}}{{l}}{{\emph{{{escape(title)}}}}}"]
        for name in rows:
            cells = [part.cell(column, part.row(name)) for part, names in pairs for column in names]
            signs = dict.fromkeys(sign for part in parts for sign in part.sign(part.row(name)))
            yield [escape(name + "".join(signs)), *cells]


def _grouped(parts: Sequence[_PaperPart], options: PaperOptions) -> Iterator[tuple[str, list[str]]]:
    """The rows' names under the headings of their groups."""
    every = list(dict.fromkeys(name for part in parts for name in part.names))
    ranked = [name for wanted in options.order for name in every if _is_called(parts, name, wanted)]
    rows = list(dict.fromkeys([*ranked, *every]))
    groups = [
        (title, [name for wanted in of for name in rows if _is_called(parts, name, wanted)])
        for title, of in options.groups
    ]
    inside = {name for _, of in groups for name in of}
    rest = [name for name in rows if name not in inside]
    yield from [("", rest)] if rest else []
    yield from ((title, list(dict.fromkeys(of))) for title, of in groups)


def _is_called(parts: Sequence[_PaperPart], name: str, wanted: str) -> bool:
    """Whether the row called ``name`` in full is meant by ``wanted``: that name, its label, or its method."""
    lines = (part.lines[part.names.index(name)] for part in parts if name in part.names)
    return any(wanted in (name, line.row, line.label, line.method) for line in lines)


def _refuse_unknown(parts: Sequence[_PaperPart], options: PaperOptions) -> None:
    columns = {name for part in parts for name in part.columns}
    for wanted in options.columns:
        if wanted not in columns:
            raise unknown_name("column of these tables", wanted, columns)
    names = {name for part in parts for name in part.names}
    known = names | {text for part in parts for line in part.lines for text in (line.label, line.method)}
    for wanted in (*options.order, *(row for _, rows in options.groups for row in rows)):
        if not any(_is_called(parts, name, wanted) for name in names):
            raise unknown_name("row of these tables", wanted, known)
