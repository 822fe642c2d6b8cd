"""The environment of a command: its clock, its signals, processes of its own, and jobs of several."""
