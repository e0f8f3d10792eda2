"""What is fast, measured against the limit of the same machine in the same run, as ratios."""
