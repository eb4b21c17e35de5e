"""What is kept: one record a plan and case, folders of them, joined and condensed to tables."""
