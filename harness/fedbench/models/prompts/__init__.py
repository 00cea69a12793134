"""Prompts of CLIP: contexts of texts, tokens beside image patches, a model with both."""
