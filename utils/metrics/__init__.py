"""Outputs -> figures: boxes, matching, average precision."""
