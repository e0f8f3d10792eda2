"""What a run is told: flags, recipes, YAML files. Imports no torch."""
