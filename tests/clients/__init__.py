"""Clients of the field against a cluster as `tandem serve` starts it: each in an environment of its own."""
