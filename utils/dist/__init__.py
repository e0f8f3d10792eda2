"""Ranks beyond `utils.torch_utils`: launching, SLURM, watching, restarting."""
