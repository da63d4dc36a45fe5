"""Watched objects into rows of the tables and pods of the queue."""
