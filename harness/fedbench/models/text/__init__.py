"""Texts as vectors: encoders of class names, and classifiers over them."""
