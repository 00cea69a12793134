"""Rows of a table: which runs they are made of, their seeds and versions, their ranks and tests."""
