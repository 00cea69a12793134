"""Flower's strategies as methods of fedbench, and fedbench's partitions for Flower."""
