"""Suite files: read, layered with the command line, resolved to specs."""
