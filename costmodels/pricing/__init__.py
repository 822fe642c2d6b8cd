"""The price of a program, item by item."""
