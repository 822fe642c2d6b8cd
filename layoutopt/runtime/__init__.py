"""What a command runs in: its clock, its signals, processes of its own, and jobs of several."""
