"""Choosing a plan: evidence, budget, ranking, and what a choice costs."""
