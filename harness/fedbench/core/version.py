"""The version of fedbench and the folder it lies in. Imports of this module keep the package root out of the rooms."""

from pathlib import Path

__version__ = "0.1.0"
PACKAGE = Path(__file__).parents[1]
"""The folder of the package `fedbench`."""
