"""The kinds of decisions: one module each, with the options of each."""
