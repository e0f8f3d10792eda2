"""Figures and images -> pictures."""
