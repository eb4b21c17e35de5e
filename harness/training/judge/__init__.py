"""Whether a candidate learns as well as its baseline."""
