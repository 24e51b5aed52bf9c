"""Transfer engines: the seam that all share, how one is found, and the embedded `local` engine."""
