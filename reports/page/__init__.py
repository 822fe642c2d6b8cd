"""The HTML page: its content is decided here, its appearance in `reports/templates`."""
