"""Advice for a federation that exists: where it lies among measured settings, and what led there."""
