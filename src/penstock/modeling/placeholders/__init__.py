"""Stand-ins for units, values and cache layers that are on other stages."""
