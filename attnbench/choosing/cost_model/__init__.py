"""How long a plan takes on a shape that was not measured."""
