"""Public functions beside `search` and `size`: prices and likely mistakes, explanations, runs, compilations.

A command parses, calls the same function, and renders its result.
"""
