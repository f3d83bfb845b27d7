"""Where a model splits (`check`), and whether it is over stages what it is unsplit (`verify`)."""
