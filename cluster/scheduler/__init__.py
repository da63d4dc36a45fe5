"""koord-scheduler: one vectorised cycle over all nodes, and a reason for every decision."""
