"""The reconciler: what is wanted of every subject, when to look, and the pass that makes it so."""
