"""Measurements condensed for choosing, the environment that they are bound to, and the tables that ship."""
