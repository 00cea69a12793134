"""Recorded runs: found by id, compared, evaluated again."""
