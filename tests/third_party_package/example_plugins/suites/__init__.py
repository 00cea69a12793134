"""Suites of the package."""
