"""Kinds of plug-ins: their base classes, and finding what packages and plug-in files register."""
