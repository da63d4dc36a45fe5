"""Wire contracts on a node: the .proto files and the modules generated from them."""
