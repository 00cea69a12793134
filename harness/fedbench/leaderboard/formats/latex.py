"""A leaderboard as LaTeX: one ``table`` environment per table of the board, for a document that loads ``booktabs``."""

from __future__ import annotations

import re
from dataclasses import replace

from fedbench.leaderboard.model import Board
from fedbench.leaderboard.tables import TextColumn, TextTable, text_tables

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
_MINUS = re.compile(r"^-(?=\d)")
_ESCAPED = re.compile("|".join(re.escape(character) for character in _ESCAPES))


def to_latex(board: Board) -> str:
    """Every table of the board under its caption and above what its marks mean."""
    head = "% \\usepackage{booktabs}\n\n"
    return head + "\n".join(_environment(shown) for shown in text_tables(board))


def escape(text: str) -> str:
    """``text`` as LaTeX prints it; letters and signs beyond ASCII that pdfLaTeX lacks are set in mathematics."""
    # on one line, since an empty one would end a paragraph, which a caption or a cell may not
    return _ESCAPED.sub(lambda found: _ESCAPES[found.group()], " ".join(text.split()))


def _environment(shown: TextTable) -> str:
    # a reason is too long for a cell
    status = [replace(one, cells=[cell.partition(":")[0] for cell in one.cells]) for one in shown.status]
    columns = [shown.rank, *shown.names, *shown.scores, *shown.further, *status]
    alignment = "".join("l" if column in (*shown.names, *status) else "r" for column in columns)
    lines = [" & ".join(_cell(column, number) for column in columns) for number in range(len(shown.rows))]
    notes = [rf"\par\smallskip{{\footnotesize {escape(note)}\par}}" for note in (*_failures(shown), *shown.notes)]
    return "\n".join(
        [
            r"\begin{table}[htbp]",
            r"\centering\small",
            rf"\caption{{{escape(shown.caption)}}}",
            rf"\begin{{tabular}}{{{alignment}}}",
            r"\toprule",
            " & ".join(escape(column.heading) for column in columns) + r" \\",
            r"\midrule",
            *(rf"{line} \\" for line in lines),
            r"\bottomrule",
            r"\end{tabular}",
            *notes,
            r"\end{table}",
            "",
        ]
    )


def _failures(shown: TextTable) -> list[str]:
    marked = [(column.sign(line), row) for column in shown.names[:1] for line, row in enumerate(shown.rows)]
    return [f"{sign} {row.name}: {row.failure}".strip() for sign, row in marked if row.failure]


def _cell(column: TextColumn, line: int) -> str:
    cell = _MINUS.sub("$-$", escape(column.cells[line]))
    bold = rf"\textbf{{{cell}}}" if column.is_best(line) else cell
    return bold + escape(column.sign(line))
