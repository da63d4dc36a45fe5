"""The runtime proxy: its state machines alone, its process against servers of the tests' own."""
