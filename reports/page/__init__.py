"""The HTML page: what each section says is decided here, how it looks in `reports/templates`."""
