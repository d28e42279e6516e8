"""A request's way through the fleet: reserved, prefilled, handed off, decoded, moved, continued."""
