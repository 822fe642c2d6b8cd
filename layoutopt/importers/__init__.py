"""Models of other libraries as graphs of ours."""
