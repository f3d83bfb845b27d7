"""How ranks meet, and what they tell each other besides the values of a step."""
