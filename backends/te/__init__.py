"""TransformerEngine's fused attention."""
