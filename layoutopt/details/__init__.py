"""Fills in what plan files carry beside the plan: what reports show, and what stands behind a price."""
