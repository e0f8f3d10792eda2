"""Parts of the training program; each module says in its first line what lives there."""
