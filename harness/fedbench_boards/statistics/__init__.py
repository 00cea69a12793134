"""Statistics over seeds and settings: tests, intervals, ties, power, ranks across settings."""
