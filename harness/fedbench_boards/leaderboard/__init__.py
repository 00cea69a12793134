"""Leaderboards: tables of stored results and their writers."""
