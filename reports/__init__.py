"""Figures, tables and HTML pages of plain result data."""
