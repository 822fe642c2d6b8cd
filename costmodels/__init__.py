"""Cost models: hardware descriptions and the seconds, bytes and peak memory of a lowered program."""
