"""How ranks meet, and what they communicate besides the values of a step."""
