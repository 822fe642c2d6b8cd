"""The cost of naming: a layout in which single places are laid out otherwise, as if their dimensions had
other names."""
