"""What may be decided: one module per kind of decision, and the options of each."""
