"""Several sensors of one recording."""
