"""Questions about layouts: why, why not, how sensitive, how sure."""
