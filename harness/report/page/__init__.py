"""Results as one page for people: what wins where, how fast against how wrong, and every candidate with its reasons."""
