"""``python -m weightsync.bench``: how fast this machine moves weights, verified."""
