"""The conformance suite: whether kernels keep the contract, check by check, with a report for their author."""
