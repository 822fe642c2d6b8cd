"""What the commands answer, from Python: one module for prices, one for explanations, one for what runs or
compiles. A command parses, calls the same function, and renders its result."""
