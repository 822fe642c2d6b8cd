"""Engines: the homes in which a program runs."""
