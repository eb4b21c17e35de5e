"""What can answer: the contract of a kernel, capabilities, plans, the registry, and running a plan."""
