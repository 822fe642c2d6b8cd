"""This project's own engines: they run every layout that a search considers."""

from layoutopt.space.restriction import EVERYTHING

SAYS = EVERYTHING
