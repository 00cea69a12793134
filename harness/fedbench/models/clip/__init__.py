"""CLIP and its relatives as backbones: loading, image patches, tokens, transformer blocks."""
