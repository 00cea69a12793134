"""Readers of data sets by the form that they lie in: parquet, image folders, lists, downloads."""
