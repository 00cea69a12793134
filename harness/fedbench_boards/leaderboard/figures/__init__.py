"""Figures of recorded runs, as papers draw them: sized for one column of a page."""
