"""The data set that is rendered from a seed, and the tiny CLIP that was pretrained for it; README.md describes both."""
