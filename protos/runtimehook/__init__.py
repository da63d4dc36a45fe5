"""The runtime hook service: what a runtime proxy asks a node agent before and after CRI calls."""
