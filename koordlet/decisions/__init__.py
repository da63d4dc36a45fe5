"""The engine in force: its rules, its timing, and the policies of the site."""
