"""Plans and explanations as plain data: what would be written, and why values are as they are."""
