"""Batches -> steps: loss, optimizer, precision, SyncBN, DDP."""
