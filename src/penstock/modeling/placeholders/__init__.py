"""What stands where a unit, a value or a layer of a cache is elsewhere."""
