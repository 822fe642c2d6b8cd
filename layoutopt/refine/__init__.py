"""What naming costs: a layout in which single places are laid out otherwise, as if their dimensions had other
names."""
