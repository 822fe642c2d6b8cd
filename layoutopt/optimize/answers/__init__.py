"""Results of a search: plans, alternatives, sensitivities and reasons why nothing fits."""
