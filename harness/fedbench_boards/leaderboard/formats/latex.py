"""A leaderboard as LaTeX: one ``table`` environment per table of the board.

For a document that loads ``booktabs`` and ``graphicx``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from fedbench_boards.leaderboard.model import Board
from fedbench_boards.leaderboard.tables import TextColumn, TextTable, text_tables

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
    return HEAD + "\n".join(_environment(shown) for shown in text_tables(board))


def escape(text: str) -> str:
    """``text`` as LaTeX prints it; letters and signs beyond ASCII that pdfLaTeX lacks are set in mathematics."""
    # on one line, since an empty one would end a paragraph, which a caption or a cell may not
    return _ESCAPED.sub(lambda match: _ESCAPES[match.group()], " ".join(text.split()))


def _environment(shown: TextTable) -> str:
    # a reason is too long for a cell
    status = [replace(one, cells=[cell.partition(":")[0] for cell in one.cells]) for one in shown.status]
    columns = [shown.rank, *shown.names, *shown.scores, *shown.further, *status]
    alignment = "".join("l" if column in (*shown.names, *status) else "r" for column in columns)
    lines = [" & ".join(cell(column, number) for column in columns) for number in range(len(shown.rows))]
    return "\n".join(
        [
            r"\begin{table}[htbp]",
            r"\centering\small",
            rf"\caption{{{escape(shown.caption)}}}",
            *tabular(
                alignment,
                [
                    " & ".join(escape(column.heading) for column in columns) + r" \\",
                    r"\midrule",
                    *(rf"{line} \\" for line in lines),
                ],
            ),
            *map(note, (*_failures(shown), *shown.notes)),
            r"\end{table}",
            "",
        ]
    )


def _failures(shown: TextTable) -> list[str]:
    marked = [(column.sign(line), row) for column in shown.names[:1] for line, row in enumerate(shown.rows)]
    return [f"{sign} {row.name}: {row.failure}".strip() for sign, row in marked if row.failure]


def tabular(alignment: str, lines: Sequence[str]) -> list[str]:
    """The ``lines`` as a tabular between rules; one that is wider than the text is made as small as that."""
    return [
        r"\smallskip",
        r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}{%",
        rf"\begin{{tabular}}{{{alignment}}}",
        r"\toprule",
        *lines,
        r"\bottomrule",
        r"\end{tabular}}",
    ]


def note(text: str) -> str:
    """A line below a table."""
    return rf"\par\smallskip{{\footnotesize {escape(text)}\par}}"


def cell(column: TextColumn, line: int, *, bold: bool | None = None) -> str:
    """A cell with its sign, bold where it is the best, or where ``bold`` asks for it."""
    text = _SIGN.sub(lambda match: f"${match.group()}$", escape(column.cells[line]))
    is_bold = column.is_best(line) if bold is None else bold
    return (rf"\textbf{{{text}}}" if is_bold else text) + escape(column.sign(line))
