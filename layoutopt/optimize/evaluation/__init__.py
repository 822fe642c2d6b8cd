"""Time, memory and pictures of one lowered layout."""
