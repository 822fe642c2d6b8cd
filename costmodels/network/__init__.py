"""How a mesh lies on hardware, and seconds of its collectives."""
