"""Sources -> detections -> files."""
