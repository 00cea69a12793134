"""fedbench: an honest benchmark of federated-learning methods, above all those on vision-language models."""

__version__ = "0.1.0"
