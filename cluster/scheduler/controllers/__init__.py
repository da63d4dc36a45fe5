"""Controllers of plugins: they keep the objects of a plugin in step with the cluster."""
