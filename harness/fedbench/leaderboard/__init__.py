"""From recorded runs to tables: rows, ranks, significance, published numbers, and the page."""
