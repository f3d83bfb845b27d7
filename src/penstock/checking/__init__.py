"""What `penstock check` says of a model: its units, boundaries, and whether stages compute what it computes."""
