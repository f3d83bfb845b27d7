"""What a forward does with its units: units, shapes, traces, plans, and what the loss is a mean of."""
