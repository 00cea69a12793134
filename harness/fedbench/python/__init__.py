"""The Python API: what ``fedbench.run`` and the other names of ``fedbench`` are. It does what the command line does."""
