"""Plans: their schema, and other libraries' forms of them."""
