"""A plug-in of every kind but methods, as a third party writes them."""
