"""State <-> files."""
