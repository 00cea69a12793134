"""Readers of stored results: leaderboards, figures, maps, advice, the site, results by others. No run imports it."""
