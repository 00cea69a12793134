"""``python -m fedbench`` is the command ``fedbench``."""

from fedbench.cli.app import command

if __name__ == "__main__":
    command()
