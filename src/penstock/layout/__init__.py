"""Which units each rank holds: templates, partitions, pipelines placed on ranks. Needs no torch."""
