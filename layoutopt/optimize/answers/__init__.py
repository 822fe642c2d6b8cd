"""What a search returns: plans, alternatives, sensitivities and reasons why nothing fits."""
