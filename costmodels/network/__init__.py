"""The placement of a mesh on hardware, and seconds of its collectives."""
