"""A board over all its settings: ranks, a diagram of critical differences, the map of a suite with axes."""
