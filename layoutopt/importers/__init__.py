"""Models of other libraries, imported as graphs."""
