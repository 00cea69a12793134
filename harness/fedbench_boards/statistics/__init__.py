"""What numbers over seeds and settings can decide: tests, intervals, ties, power, ranks across settings."""
