"""The gate: two environments measured in turns until each row is known to be slower or not."""
