"""What every process needs: errors, the log, signals, devices, image files."""
