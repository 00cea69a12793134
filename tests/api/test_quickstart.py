"""The notebook of the first steps: from a fresh kernel to a plot in ten lines, and as committed."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).resolve().parents[2] / "harness" / "quickstart.ipynb"


def test_it_is_committed_with_its_outputs() -> None:
    codes = [cell for cell in nbformat.read(NOTEBOOK, as_version=4).cells if cell.cell_type == "code"]
    assert codes and all(cell.outputs for cell in codes)


@pytest.mark.slow
def test_ten_lines_of_the_quickstart_lead_to_a_plot_and_the_notebook_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FEDBENCH_DATA", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    book = nbformat.read(NOTEBOOK, as_version=4)
    codes = [cell for cell in book.cells if cell.cell_type == "code"]
    NotebookClient(book, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [[output.get("data", {}) for output in cell.outputs] for cell in codes]
    plotted = next(place for place, outputs in enumerate(shown) if any("image/png" in data for data in outputs))
    lines = [line for cell in codes[: plotted + 1] for line in cell.source.splitlines() if line.strip()]
    assert len(lines) <= 10
    assert any("<table>" in data.get("text/html", "") for outputs in shown for data in outputs)
    assert not [output for cell in codes for output in cell.outputs if output.get("name") == "stderr"]
    assert (tmp_path / "fedbench-store" / "mlflow.db").is_file()
