"""Layouts that are priced before any proof: named strategies, recipes, incumbents."""
