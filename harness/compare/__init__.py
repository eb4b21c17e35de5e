"""Whether what was measured has become worse: two sets of results compared, and a gate that measures until it knows."""
