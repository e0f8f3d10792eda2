"""The networks: their layers, the parser of model YAMLs, and what differs by family."""
