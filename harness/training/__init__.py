"""Training end to end: models whose attention is chosen by plan, the precision around it, and real data to learn."""
