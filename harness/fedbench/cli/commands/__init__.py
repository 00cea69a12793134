"""The commands of ``fedbench``, one module each."""
