"""A failure on one rank becomes an error on every rank that names it; nobody waits for ever."""
