"""State machines over a whole simulated node: what holds whatever happens, in any order."""
