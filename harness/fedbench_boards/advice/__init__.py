"""Advice for an existing federation: its place among measured settings, and the methods that led there."""
