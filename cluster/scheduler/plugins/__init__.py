"""One file for each plugin: a filter and a score over the tables. Pure."""
