"""What the command line and the Python API do alike: from what is asked for to what is stored. Nothing here prints."""
