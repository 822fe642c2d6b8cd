"""Models that a user would bring."""
