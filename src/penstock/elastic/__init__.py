"""Training that survives lost devices and takes in new ones: membership, agreement, steps as transactions, recovery."""
