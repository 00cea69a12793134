"""Optuna: what is searched, studies and their trials, and the workers that carry them out."""
