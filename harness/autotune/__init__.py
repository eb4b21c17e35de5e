"""Measure the specs that a program uses, within a time limit, and add them to the user's table."""
