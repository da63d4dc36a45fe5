"""The reconciler: desired values of every subject, triggers, and passes that write what differs."""
