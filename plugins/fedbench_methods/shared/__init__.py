"""Parts that a few methods have in common. They import no method."""
