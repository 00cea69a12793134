"""CSV that a spreadsheet shows and never obeys: names and messages in it come from users and plugins."""

from __future__ import annotations

import pandas as pd

_FORMULA = ("=", "+", "-", "@", "\t", "\n", "＝", "＋", "－", "＠")
"""What a cell begins with that spreadsheets take for a formula, and what they skip before one."""


def csv_text(frame: pd.DataFrame) -> str:
    """``frame`` as CSV without its index; texts that a spreadsheet would calculate get an apostrophe in front."""
    texts = frame.select_dtypes(["object", "string"])
    readable = frame.assign(**{str(name): texts[name].map(_readable) for name in texts})
    return readable.rename(columns=_readable).to_csv(index=False)


def _readable(value: object) -> object:
    if not isinstance(value, str):
        return value
    # pandas puts no quotes around a carriage return, and many readers begin a line there
    text = value.replace("\r\n", "\n").replace("\r", "\n")
    return f"'{text}" if text.startswith(_FORMULA) and not _is_number(text) else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
