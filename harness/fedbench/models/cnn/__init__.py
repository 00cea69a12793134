"""Convolutional networks as backbones, trained from scratch, from weights of ImageNet, or pretrained and frozen."""
