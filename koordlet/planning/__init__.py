"""What would be written and why: plans and explanations as plain data."""
