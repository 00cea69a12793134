"""Convolutional networks as backbones, trained from scratch."""
