"""A package, so that the cluster ends with the last test in this folder."""
