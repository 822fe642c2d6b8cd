"""The environment of a command: its clock, its signals, its child processes, and jobs of several
processes."""
