"""Files -> samples -> batches."""
